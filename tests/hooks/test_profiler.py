"""Hook ``profiler``: what is in a trace, which updates it has, and that nothing else changes."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import ConfigError, Trainer
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.hooks.profiler import Profiler
from phaseloop.hooks.timing import Timing
from tests.rigs import equal, pairs, process, r1
from tests.rigs.probes import Break, BreakAt, parameters

# What TensorBoard's profiler plugin takes for a worker's trace.
PLUGIN = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def traces(folder: Path) -> dict[str, Counter[str]]:
    """By file, how often each named range of ours and each step is in it."""
    found = {}
    for path in sorted((folder / "profile").glob("*")):
        if not path.name.endswith(".json"):
            continue
        assert PLUGIN.match(path.name)
        events = json.loads(path.read_text())["traceEvents"]
        names = [e["name"] for e in events if e.get("ph") == "X"]
        ours = [n for n in names if n.startswith(("phaseloop ", "ProfilerStep#"))]
        found[path.name] = Counter(ours)
        assert "aten::linear" in names
    return found


def train(folder: Path | None, hook: Profiler | None, **options: Any) -> Any:
    hooks = options.pop("hooks", {})
    task = r1.make_task(folder, **{"epochs": 1, **options})
    given = r1.make_hooks(**hooks) if hook is None else r1.make_hooks(profiler=hook, **hooks)
    Trainer(task, given).train()
    return task


def steps(counts: Counter[str]) -> list[int]:
    return sorted(int(n.split("#")[1]) for n in counts if n.startswith("ProfilerStep#"))


def test_the_chosen_updates_and_the_parts_of_each(tmp_path: Path) -> None:
    """Two micro-batches an update; R1's hooks are called as often as their events come."""
    train(tmp_path, Profiler([4, 6]), data={"micro_batch_size": 2})
    ((name, counts),) = traces(tmp_path).items()
    assert name == "rank0_updates_4-6.pt.trace.json"
    assert steps(counts) == [4, 5, 6]
    updates, micro_batches = 3, 6
    # An update ends within its last step, at this hook's on_step: its last range is cut there.
    for part in ("step", "forward", "loss", "backward", "update"):
        assert counts[f"phaseloop {part}"] == micro_batches, part
    assert counts["phaseloop hook learning_rate"] == updates + micro_batches
    table = (tmp_path / "profile" / "rank0_updates_4-6.txt").read_text()
    assert "phaseloop forward" in table and "aten::" in table


def test_the_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    options = {"augment": True, "epochs": 2}
    plain = train(tmp_path / "plain", None, **options)
    hook = Profiler([3, 5], record_shapes=True, with_stack=True, profile_memory=True)
    watched = train(tmp_path / "watched", hook, hooks={"timing": Timing()}, **options)
    assert torch.equal(parameters(plain), parameters(watched))
    assert len(traces(tmp_path / "watched")) == 1
    a, b = (equal.newest(tmp_path / name) for name in ("plain", "watched"))
    found = [equal.state_of(s)["rng"] for s in (a, b)]
    assert not list(equal.differ("rng", *found))


def test_from_the_first_update_without_warmup(tmp_path: Path) -> None:
    train(tmp_path, Profiler([1, 2], warmup=0))
    ((name, counts),) = traces(tmp_path).items()
    assert name == "rank0_updates_1-2.pt.trace.json"
    assert steps(counts) == [1, 2]


def test_a_run_that_ends_before_the_last_of_them(tmp_path: Path) -> None:
    train(tmp_path, Profiler([9, 20]))
    assert list(traces(tmp_path)) == ["rank0_updates_9-10.pt.trace.json"]


def test_a_run_that_breaks_off(tmp_path: Path) -> None:
    with pytest.raises(Break):
        train(tmp_path, Profiler([4, 9]), hooks={"stop": BreakAt(6)})
    assert list(traces(tmp_path)) == ["rank0_updates_4-6.pt.trace.json"]


def resumed(folder: Path, updates: list[int], stop_at: int | None = None) -> None:
    hooks = {"stop": BreakAt(stop_at)} if stop_at else {}
    r1.train(
        folder, equal.probe_of(folder), epochs=1, save={"every_updates": 1},
        hooks={"profiler": Profiler(updates), **hooks},
    )  # fmt: skip


@pytest.mark.parametrize(("stop_at", "name"), [(7, None), (5, "rank0_updates_6-6.pt.trace.json")])
def test_a_resume_watches_only_what_it_trains(
    tmp_path: Path, stop_at: int, name: str | None
) -> None:
    """Past them it does nothing; with some of them left it watches those."""
    folder = tmp_path / "run"
    assert process.run(resumed, folder, [4, 6], stop_at).code == 1
    before = traces(folder)
    assert list(before) == [f"rank0_updates_4-{min(stop_at, 6)}.pt.trace.json"]
    process.result(resumed, folder, [4, 6])
    assert traces(folder).keys() - before.keys() == ({name} if name else set())
    plain = equal.reference(epochs=1)
    saved = [store.load(equal.newest(f), MODEL) for f in (plain, folder)]
    assert not list(equal.differ("model", *saved))


def test_without_a_folder_or_beyond_the_end_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "phaseloop"):
        task = r1.make_task(None, epochs=1)
        Trainer(task, {"profiler": Profiler()}).train()
        train(tmp_path, Profiler([11, 12]))
    assert "hooks.profiler: the run has no folder; nothing is profiled" in caplog.text
    assert "hooks.profiler.updates: the run ends at update 10, before 11" in caplog.text
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": [5, 4]}, r"hooks.profiler.updates: give the first and the last.*\[5, 4\]"),
        ({"updates": [0, 4]}, "hooks.profiler.updates"),
        ({"updates": 5}, "hooks.profiler.updates"),
        ({"updates": [1.5, 4]}, "hooks.profiler.updates"),
        ({"updates": [1, 2, 3]}, "hooks.profiler.updates"),
        ({"warmup": -1}, "hooks.profiler.warmup: -1 is less than 0"),
        ({"rows": 0}, "hooks.profiler.rows: 0 is less than 1"),
        ({"ranks": []}, "hooks.profiler.ranks"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profiler(**options)


def test_a_rank_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks.profiler.ranks: there is no rank 1: .*1 pro"):
        train(tmp_path, Profiler(ranks=[0, 1]))


def of_ranks(folder: Path, **options: Any) -> None:
    task = r1.make_task(folder, epochs=1, backend=pairs.ddp())
    pairs.train(task, **r1.make_hooks(profiler=Profiler([4, 4], **options)))


def test_of_several_processes_the_primary_or_those_that_are_named(tmp_path: Path) -> None:
    pairs.results(
        [
            (of_ranks, {"folder": tmp_path / "one"}),
            (of_ranks, {"folder": tmp_path / "other", "ranks": [1]}),
        ]
    )
    assert list(traces(tmp_path / "one")) == ["rank0_updates_4-4.pt.trace.json"]
    ((name, counts),) = traces(tmp_path / "other").items()
    assert name == "rank1_updates_4-4.pt.trace.json"
    assert counts["phaseloop processes"] > 0
