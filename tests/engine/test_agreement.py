"""Agreement: what one process asks for, or finds, all processes do, at the same update."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, LossScale, Phases, Precision, Run, Task, TensorData
from phaseloop.engine.backends import Ddp
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.hooks.row_sync import RowSync
from tests.rigs import equal, pairs, r0, r1, ranks
from tests.rigs.pairs import Failed
from tests.rigs.r1 import At

UPDATES = 6
BATCH = 4
"""Two samples a process."""


class OnRank1(Hook):
    """Does something at one event, on rank 1 alone, where so many updates are made."""

    def __init__(self, event: str, act: str, updates: int, phase: str = "train", **more: Any):
        self.event, self.act, self.updates, self.phase = event, act, updates, phase
        self.more = more
        self.done = False

    def on_gradients(self, task: Task) -> None:
        self._at("on_gradients", task)

    def on_step(self, task: Task) -> None:
        self._at("on_step", task)

    def _at(self, event: str, task: Task) -> None:
        here = task.backend.rank == 1 and task.progress.updates == self.updates
        if here and not self.done and (event, task.phase.name) == (self.event, self.phase):
            self.done = True
            getattr(task, self.act)("asked for", **self.more)


class Lying(OnRank1):
    """Says that it does the same on all, and does not."""

    alike = True


class Last(Hook):
    """Notes what was counted, and what happened."""

    order = 99

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, task: Task) -> None:
        progress = task.progress
        self.seen.append((task.phase.name, task.phase.position, progress.updates, progress.skipped))


def scalar(
    xs: list[float] | None = None,
    *,
    model: nn.Module | None = None,
    folder: str | None = None,
    epochs: int = 1,
    log_every: int = 100,
    **options: Any,
) -> Task:
    """R0: w is minus the sum of the means of the updates that counted, each of them 1."""
    model = r0.Scalar() if model is None else model
    return Task(
        model=model,
        criterion=r0.mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        train=Data(r0.numbers([1.0] * UPDATES * BATCH if xs is None else xs), BATCH, shuffle=False),
        phases=Phases(epochs=epochs),
        backend=pairs.ddp(),
        run=Run(folder, log_every=log_every),
        **options,
    )


def run(task: Task, **hooks: Hook) -> dict[str, Any]:
    last = Last()
    outcome = pairs.train(task, **hooks, last=last)
    return {
        "w": r0.weight(task) if hasattr(task.bare_model, "w") else None,
        "status": outcome.status,
        "reason": outcome.reason,
        "updates": task.progress.updates,
        "skipped": task.progress.skipped,
        "roll_backs": task.progress.roll_backs,
        "epoch": task.progress.epoch,
        "last_skip": task._last_skip,
        "seen": last.seen,
    }


def asked(
    event: str, act: str, updates: int, task: dict[str, Any] | None = None, **more: Any
) -> Any:
    options = dict(task or {})
    if options.pop("test", False):
        options["test"] = Data(r0.numbers([1.0] * 5 * BATCH), BATCH)
    return run(scalar(**options), asks=OnRank1(event, act, updates, **more))


def two_optimizers() -> Any:
    model = r0.Pair()
    task = Task(
        model=model, criterion=r0.mean_output, backend=pairs.ddp(),
        optimizer={"a": torch.optim.SGD([model.a], 1.0), "b": torch.optim.SGD([model.b], 1.0)},
        train=Data(TensorData(torch.ones(UPDATES * BATCH, 2)), BATCH), phases=Phases(epochs=1),
    )  # fmt: skip

    class One(Hook):
        def on_gradients(self, task: Task) -> None:
            if task.backend.rank == 1 and task.progress.updates == 2:
                task.skip_update("asked for", "b")

    found = run(task, one=One())
    if task.backend.rank == 1:
        assert found.pop("last_skip") == "asked for"  # as it said itself
        found["last_skip"] = "rank 1: asked for"
    return {**found, "a": float(model.a.detach()), "b": float(model.b.detach())}


def rolled_back(folder: str) -> Any:
    task = scalar(folder=folder, epochs=2)
    hook = OnRank1("on_gradients", "roll_back", 4, most=1)
    return run(task, save=Checkpoint(every_updates=3), asks=hook)


def skips_beside_logs_and_saves(folder: str) -> Any:
    """Where they come apart, logs and saves would wait for each other."""
    hook = OnRank1("on_gradients", "skip_update", 2)
    save = Checkpoint(every_updates=1)
    return run(scalar(folder=folder, log_every=1), rows=RowSync(), save=save, asks=hook)


class Breaks(r0.Scalar):
    """Its output is not finite for a sample of 7, the first time."""

    broken = False
    harmless = False
    """Only the loss shows it: no gradient does."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.w * torch.where(x == 7, 1.0, x)
        if (x == 7).any() and not self.broken:
            self.broken = True
            if self.harmless:
                return torch.where(x == 7, math.nan, output)
            return output * torch.where(x == 7, math.nan, 1.0)
        return output


def not_finite(
    policy: str, folder: str | None = None, precision: Any = "float32", harmless: bool = False
) -> Any:
    """The last sample of the fourth batch, on rank 1, is bad."""
    xs = [1.0] * UPDATES * BATCH
    xs[4 * BATCH - 1] = 7
    task = scalar(xs, folder=folder, model=Breaks(), precision=precision)
    task.bare_model.harmless = harmless
    hooks: dict[str, Hook] = {} if folder is None else {"save": Checkpoint(every_updates=2)}
    return run(task, non_finite=NonFinite(policy), **hooks)


def overflows() -> Any:
    """float16: a gradient on rank 1 is too large for it when scaled by 2 ** 15."""
    xs = [1.0] * UPDATES * BATCH
    xs[3 * BATCH - 1] = 7

    class Large(r0.Scalar):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x == 7, 3e38, 1.0) * self.w

    precision = Precision("float16", loss_scale=LossScale(initial=2.0**15))
    task = scalar(xs, model=Large(), precision=precision)
    found = run(task)
    return {**found, "scale": task.precision.scaler.state_dict()}


_CASES = {
    "skip": (asked, {"event": "on_gradients", "act": "skip_update", "updates": 2}),
    "skip one of two": (two_optimizers, {}),
    "stop": (asked, {"event": "on_step", "act": "request_stop", "updates": 2}),
    "end": (
        asked, {"event": "on_step", "act": "end_phase", "updates": 2, "task": {"epochs": 2}}
    ),
    "end a test": (
        asked, {"event": "on_step", "act": "end_phase", "updates": UPDATES, "phase": "test",
                "task": {"test": True}}
    ),
    "not finite, skip": (not_finite, {"policy": "skip"}),
    "overflow": (overflows, {}),
}  # fmt: skip
_found: dict[str, list[Any]] = {}


def of_two(name: str) -> dict[str, Any]:
    """What a case gave on both processes, which has to be the same."""
    if not _found:
        _found.update(zip(_CASES, pairs.results(list(_CASES.values())), strict=True))
    first, second = _found[name]
    assert not isinstance(first, Failed), first
    assert first == second
    return dict(first)


def test_an_update_that_one_process_leaves_out() -> None:
    found = of_two("skip")
    assert (found["w"], found["updates"], found["skipped"]) == (-(UPDATES - 1), UPDATES - 1, 1)
    assert found["last_skip"] == "rank 1: asked for"


def test_an_optimizer_that_one_process_leaves_out() -> None:
    found = of_two("skip one of two")
    assert (found["a"], found["b"]) == (-UPDATES, -(UPDATES - 1))
    assert (found["updates"], found["last_skip"]) == (UPDATES, "rank 1: asked for")


def test_a_stop_that_one_process_asks_for() -> None:
    found = of_two("stop")
    # Asked for after update 2, told with window 3.
    assert (found["status"], found["reason"], found["updates"]) == ("stopped", "asked for", 3)


def test_an_end_of_the_phase_that_one_process_asks_for() -> None:
    found = of_two("end")
    assert (found["status"], found["updates"], found["epoch"]) == ("finished", 3 + UPDATES, 2)
    found = of_two("end a test")
    tested = [position for name, position, *_ in found["seen"] if name == "test"]
    assert tested == [1, 2]


def test_not_finite_on_one_process_and_skipped() -> None:
    found = of_two("not finite, skip")
    assert (found["w"], found["updates"], found["skipped"]) == (-(UPDATES - 1), UPDATES - 1, 1)
    assert found["last_skip"] == (
        "not finite: a gradient of w, and the loss on rank 1 (epoch 1, batch 4, samples 14, 15)"
    )


def test_an_overflow_on_one_process() -> None:
    found = of_two("overflow")
    assert (found["updates"], found["skipped"]) == (UPDATES - 1, 1)
    assert found["scale"]["scale"] == 2.0**14


# --- with a folder ---


def test_in_a_folder(tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("back", "saves", "not_finite", "scaled")]
    half = Precision("float16", loss_scale=LossScale(initial=2.0))
    cases: list[pairs.Case] = [
        (rolled_back, {"folder": places[0]}),
        (skips_beside_logs_and_saves, {"folder": places[1]}),
        (not_finite, {"policy": "roll_back", "folder": places[2]}),
        (not_finite, {"policy": "roll_back", "folder": places[3], "precision": half}),
    ]
    all_ = pairs.results(cases)
    for first, second in all_:
        assert not isinstance(first, Failed), first
        assert first == second
    back, saves, bad, scaled = [first for first, _ in all_]
    assert (back["roll_backs"], back["updates"], back["w"]) == (1, 2 * UPDATES, -2 * UPDATES)
    assert back["last_skip"] == "rank 1: asked for"
    assert (saves["updates"], saves["skipped"]) == (UPDATES - 1, 1)
    for found in (bad, scaled):
        assert (found["roll_backs"], found["updates"], found["w"]) == (1, UPDATES, -UPDATES)
        assert "the loss on rank 1 (epoch 1, batch 4, samples 14, 15)" in found["last_skip"]


# --- errors ---


def lied_about() -> Any:
    """Rank 1 leaves out the third update, and says nothing."""
    return run(scalar(), asks=Lying("on_gradients", "skip_update", 2))


@pytest.mark.parametrize("harmless", [False, True])
def test_not_finite_on_one_process_and_stopped(harmless: bool) -> None:
    options = {"policy": "stop", "harmless": harmless}
    ((first, second),) = pairs.results([(not_finite, options)])
    assert isinstance(first, Failed)
    assert first == second
    assert first.startswith(
        "NonFiniteError: rank 1: the loss of update 4 is not finite (epoch 1, batch 4, samples 14, "
        "15)"
    )


def test_processes_that_have_come_apart() -> None:
    ((first, second),) = pairs.results([(lied_about, {})])
    assert first == second == (
        "PhaseloopError: the processes have come apart: a step or a hook has done on one what it "
        "has not done on the others (rank 0: phase train, epoch 1, batch 3, updates 3, steps 4, "
        "saves 0, roll-backs 0; rank 1: phase train, epoch 1, batch 3, updates 2, steps 4, saves "
        "0, roll-backs 0)"
    )  # fmt: skip


# --- killed in between ---


def ends_early(folder: Path, kill: bool) -> None:
    """Rank 1 asks for the end of the epoch after update 4, which is saved; it comes after 5."""
    hooks: dict[str, Hook] = {"asks": OnRank1("on_step", "end_phase", 4)}
    if kill:
        hooks["at"] = At("on_step", 4)
    r1.train(
        folder, equal.probe_of(folder) if pairs.rank() == 0 else None, hooks=hooks,
        save={"every_updates": 2}, backend=Ddp("cpu", timeout=20, start_timeout=20), epochs=2,
    )  # fmt: skip


def test_an_end_asked_for_and_not_yet_told_is_in_the_checkpoint(tmp_path: Path) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    ranks.results(ends_early, reference, False)
    ended = ranks.run(ends_early, folder, True)
    assert [one.code for one in ended] == [-signal.SIGKILL] * 2
    ranks.results(ends_early, folder, False)
    equal.assert_eq(reference, folder)
    assert equal.state_of(equal.newest(folder))["progress"]["updates"] == 5 + r1.UPDATES


class LastAsks(OnRank1):
    """Of one process, that one; of two, the second."""

    def on_step(self, task: Task) -> None:
        if task.backend.rank == task.backend.world_size - 1 and task.progress.updates == 4:
            task.request_stop("asked for")


def stops(folder: Path, kill: bool = False) -> Any:
    """A stop is asked for after update 4, which is saved; two processes stop after 5."""
    hooks: dict[str, Hook] = {"asks": LastAsks("on_step", "request_stop", 4)}
    if kill:
        hooks["at"] = At("on_step", 4)
    return r1.train(
        folder, equal.probe_of(folder) if pairs.rank() == 0 else None, hooks=hooks, epochs=1,
        save={"every_updates": 2}, backend=Ddp("cpu", timeout=20, start_timeout=20),
    )  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_asked_for_and_killed_before_the_border(tmp_path: Path, processes: int) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    for one in ranks.results(stops, reference, processes=processes):
        assert (one["status"], one["reason"]) == ("stopped", "asked for")
    ended = ranks.run(stops, folder, kill=True, processes=processes)
    assert [one.code for one in ended] == [-signal.SIGKILL] * processes
    for one in ranks.results(stops, folder, processes=processes):
        assert (one["status"], one["reason"]) == ("stopped", "asked for")
    equal.assert_eq(reference, folder)
    assert equal.state_of(equal.newest(folder))["progress"]["updates"] == 3 + processes
    # It has stopped for that: whoever starts it again has it go on.
    for one in ranks.results(stops, folder, processes=processes):
        assert one["status"] == "finished"
