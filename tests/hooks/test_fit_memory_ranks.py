"""Hook ``fit_memory`` on two processes: out of memory on one, both begin the update anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import Data, Hook, Task, register_train_step
from phaseloop.engine.backends import Ddp
from phaseloop.engine.errors import ConfigError
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.meter_sync import MeterSync
from tests.hooks.test_fit_memory import From, Net, make, run, same
from tests.rigs import equal, pairs, r1, ranks
from tests.rigs.pairs import Failed

BATCH = 16
SHARE = 8
"""Of a batch of 16; of an epoch's third and last, of 8 samples, it is 4."""
LIMIT = 3
CUT = 2
"""What 8 comes to by halving, 8, 4, 2, where no more than 3 fit."""
UPDATES = 3
"""In an epoch."""


def full(task: Task) -> None:
    """No more than 3 samples fit from now on, on rank 1; there is memory enough on rank 0."""
    if task.backend.rank == 1:
        task.bare_model.limit = LIMIT


def sized(**options: Any) -> Task:
    data = {"batch_size": BATCH, **options.pop("data", {})}
    return make(Net(options.pop("where", "forward")), backend=pairs.ddp(), data=data, **options)


def cut(task: Task) -> None:
    """What a run that never breaks off does: cut the next batch smaller."""
    task.loaders[task.phase.name].cut_smaller(CUT)
    task.drop_batches()


class Wrapped(Hook):
    """Notes whether the model reduces its gradients while backward runs."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_gradients(self, task: Task) -> None:
        self.seen.append(task.model is not task.bare_model)


@register_train_step("window_in_test_fit_memory", takes="window")
def by_window(task: Task) -> None:
    for batch in task.window():
        loss = task.criterion(task.forward(batch.input), batch.target)
        if task.train:
            task.backward(loss)
    task.update()


def broken(prove: int = 20, from_update: int = 1, **options: Any) -> dict[str, Any]:
    task = sized(**options)
    fit, wrapped = FitMemory(prove=prove), Wrapped()
    found = run(task, fit=fit, full=From(from_update, full), wrapped=wrapped)
    return {**found, "sizes": fit.sizes, "tried": task.bare_model.tried, "wrapped": wrapped.seen}


def whole(**options: Any) -> dict[str, Any]:
    task = sized(**options)
    return {**run(task, cut=From(1, cut)), "tried": task.bare_model.tried}


def hopeless() -> dict[str, Any]:
    task = sized()
    if pairs.rank() == 1:
        task.bare_model.limit = 0
    return run(task, fit=FitMemory(least=3))


def in_tests(broken: bool) -> dict[str, Any]:
    """Rank 1 has too little memory for its part of a test, from the start."""
    task = sized(test={"test": Data(r1.Samples(21, augment=True), 10)})
    fit = FitMemory()
    task.bare_model.tests_too = True
    if broken:
        full(task)
    pairs.train(task, sync=MeterSync(), **({"fit": fit} if broken else {}))
    return {"sizes": fit.sizes, "metrics": task.metrics}


OF_WINDOWS: dict[str, Any] = {"train_step": by_window}
CASES: dict[str, pairs.Case] = {
    "forward": (broken, {}),
    "backward": (broken, {"where": "backward"}),
    "in pieces": (broken, {"data": {"accumulate": 2}}),
    "by window": (broken, OF_WINDOWS),
    "from the start": (broken, {"from_update": 0}),
    "whole": (whole, {}),
    "whole in pieces": (whole, {"data": {"accumulate": 2}}),
    "whole by window": (whole, OF_WINDOWS),
    "proven": (broken, {"prove": 2, "from_update": 99}),
    "tested": (in_tests, {"broken": True}),
}
_found: dict[str, list[Any]] = {}


def of_two(name: str) -> list[Any]:
    if not _found:
        _found.update(zip(CASES, pairs.results(list(CASES.values())), strict=True))
    assert not isinstance(_found[name][0], Failed), _found[name][0]
    return [dict(found) for found in _found[name]]


@pytest.mark.parametrize(
    ("name", "reference"),
    [("forward", "whole"), ("backward", "whole"), ("in pieces", "whole in pieces"),
     ("by window", "whole by window")],
)  # fmt: skip
def test_the_run_is_one_that_had_the_small_size_from_that_batch_on(
    name: str, reference: str
) -> None:
    for rank, (found, wanted) in enumerate(zip(of_two(name), of_two(reference), strict=True)):
        assert found.pop("sizes") == {"data.train": CUT}
        tried, pieces = found.pop("tried"), wanted.pop("tried")
        found.pop("wrapped")
        if name in ("forward", "backward"):
            rest = [CUT] * (4 + 2) + [CUT] * (4 + 4 + 2)
            assert pieces == [SHARE, *rest]
            # Both begin anew, though only rank 1 has too little memory.
            in_vain = [SHARE, 4, 4] if rank == 0 else [SHARE, 4]
            assert tried == [SHARE, *in_vain, *rest]
        same(wanted, found)


def test_from_the_first_update_on() -> None:
    first, second = of_two("from the start")
    assert first["sizes"] == second["sizes"] == {"data.train": CUT}
    for name, value in first["model"].items():
        if "running" not in name:  # since the last window each has moved its own
            assert torch.equal(value, second["model"][name])


def test_a_proven_size_is_reduced_while_backward_runs() -> None:
    for found in of_two("proven"):
        # Two updates with a share of 8; that of 4 is proven by that.
        assert found["wrapped"] == [False] * 2 + [True] * (2 * UPDATES - 2)
        assert found["sizes"] == {}


def test_a_test_that_does_not_fit_on_one_process() -> None:
    first, second = of_two("tested")
    assert first["sizes"] == second["sizes"] == {"data.train": CUT, "data.test": 3}
    assert first["metrics"] == second["metrics"]
    assert "test/accuracy" in first["metrics"]


# --- what cannot be redone ---

TEXT = "(CUDA out of memory. Tried to allocate 2 GiB.)"


def test_no_smaller_size() -> None:
    ((first, second),) = pairs.results([(hopeless, {})])
    assert first == second == (
        "OutOfMemoryError: out of memory at update 1 with micro-batches of 3 on rank 1: "
        f"hooks.fit.least=3 allows no smaller ones {TEXT}"
    )  # fmt: skip


def test_memory_that_is_gone_when_the_size_is_proven() -> None:
    ((first, second),) = pairs.results([(broken, {"prove": 1, "from_update": UPDATES})])
    assert second == (
        "OutOfMemoryError: out of memory at update 4 with micro-batches of 8 on rank 1: the update "
        "cannot be redone, since after 1 updates with this size (hooks.fit_memory.prove) the "
        f"others no longer wait for that; resume with data.train.micro_batch_size=4 {TEXT}"
    )
    assert isinstance(first, Failed)  # in time: it is left alone


def test_a_model_that_processes_go_through_together() -> None:
    task = make(Net())
    task.backend.world_size, task.backend.collective_forward = 2, True  # type: ignore[misc]
    hook = FitMemory()
    hook.name = "fit"
    task.agreement = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"^hooks\.fit: processes have to go through this model"):
        hook.on_start(task)


# --- killed and resumed ---


def resumable(folder: Path, kill: int | None) -> None:
    rank = os.environ["RANK"]
    hooks: dict[str, Hook] = {"fit": FitMemory(prove=4), "full": From(2, full)}
    if kill is not None:
        hooks["at"] = r1.At("on_step", kill)
    probe = folder.with_name(f"{folder.name}.probe")
    data = {"train": Data(r1.Samples(augment=True), BATCH)}
    r1.train(
        folder, probe if rank == "0" else None, hooks=hooks, save={"every_updates": 4},
        model=Net(), backend=Ddp("cpu", timeout=20, start_timeout=20), **data,
    )  # fmt: skip


@pytest.mark.parametrize("kill", [5, 7])
def test_killed_and_resumed(tmp_path: Path, kill: int) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    ranks.results(resumable, reference, None)
    ended = ranks.run(resumable, folder, kill)
    assert [one.code for one in ended] == [-signal.SIGKILL] * 2
    ranks.results(resumable, folder, None)
    equal.assert_eq(reference, folder)
    state = equal.state_of(equal.newest(folder))["hooks"]["fit"]
    assert state["sizes"] == {"data.train": CUT}
