"""SPD: what a step costs beyond the hand-written loop, in calls and in waits for the device."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phaseloop import (
    Accuracy,
    Data,
    Gradients,
    Hook,
    Order,
    Phases,
    Run,
    Schedule,
    Task,
    TensorData,
    Trainer,
    default_hooks,
)
from phaseloop.engine.schedules import cosine
from phaseloop.hooks.average import Average
from phaseloop.hooks.non_finite import NonFinite
from tests.rigs import r1

BATCH = 4


def tensors(steps: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets for so many batches."""
    x = torch.randn(steps * BATCH, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def hand_written(steps: int) -> Callable[[], None]:
    """The loop that the engine is compared with."""
    x, y = tensors(steps)
    model = r1.network()
    criterion = nn.CrossEntropyLoss()
    optimizer = r1.optimizer("sgd", model)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            loss = criterion(model(x[indices]), y[indices])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def engine(
    steps: int,
    hooks: dict[str, Hook],
    meters: int,
    folder: str | None = None,
    log_every: int = 10**9,
    **options: Any,
) -> Callable[[], None]:
    """The same by the engine, with so many meters, and a schedule where a hook sets it."""
    x, y = tensors(steps)
    model = r1.network()
    built_in = {f"accuracy_{k}": Accuracy(top_k=k) for k in range(1, meters + 1)}
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=r1.optimizer("sgd", model),
        train=Data(TensorData(x, y), BATCH),
        train_meters=built_in,
        phases=Phases(epochs=1),
        schedule=Schedule(cosine()) if "learning_rate" in hooks else (),
        run=Run(folder, log_every=log_every),
        **options,
    )
    trainer = Trainer(task, hooks)

    def run() -> None:
        trainer.train()

    return run


def calls(run: Callable[[], None]) -> tuple[int, int]:
    """Calls of Python functions, generators resumed included, and of built-in functions."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return counted(profile)


def counted(profile: cProfile.Profile) -> tuple[int, int]:
    """Calls that a profile has seen."""
    python = built_in = 0
    # Not pstats: it knows functions by file, line and name, and every dataclass has an __init__
    # in line 2 of "<string>".
    for entry in profile.getstats():
        if isinstance(entry.code, str):
            built_in += entry.callcount
        else:
            python += entry.callcount
    return python, built_in


def calls_per_step(make: Callable[[int], Callable[[], None]]) -> tuple[float, float]:
    """Calls of one step: a long run less a short one, so that the start is left out."""
    make(2)()  # imports and caches of the first run
    short, long = 20, 60
    first, second = calls(make(short)), calls(make(long))
    python, built_in = ((b - a) / (long - short) for a, b in zip(first, second, strict=True))
    return python, built_in


class Profiled(Hook):
    """Profiles whole steps: from the end of update 10 to the end of update 50.

    So what a run does at its start and its end, where a picture takes a hundred thousand calls,
    is no part of it.
    """

    order = Order.CHECKPOINT
    saves = True  # it does not, but has to come after what does
    FIRST, LAST = 10, 50

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.FIRST:
            self.profile.enable()
        elif task.progress.updates == self.LAST:
            self.profile.disable()

    def per_step(self) -> tuple[float, float]:
        """Calls of Python functions and of built-in ones, its own left out."""
        steps = self.LAST - self.FIRST
        python, built_in = counted(self.profile)
        return python / steps - 1, built_in / steps


@pytest.fixture(scope="module")
def by_hand() -> tuple[float, float]:
    return calls_per_step(hand_written)


def test_spd_a_a_bare_step_makes_at_most_30_calls_more(by_hand: tuple[float, float]) -> None:
    bare = calls_per_step(lambda steps: engine(steps, {}, 0))
    assert bare[0] - by_hand[0] <= 30


def test_spd_a_with_hooks_and_meters_at_most_120_more(
    by_hand: tuple[float, float], tmp_path: Path
) -> None:
    profiled = Profiled()
    engine(60, default_hooks(profiled=profiled), 2, str(tmp_path / "run"))()
    full = profiled.per_step()
    assert 28 < full[0] - by_hand[0] <= 120
    assert sum(full) - sum(by_hand) <= 120  # even with the calls of built-in functions


class HostReads(TorchDispatchMode):
    """Counts values that are read from a device, or whose shape depends on them."""

    READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name.startswith(self.READS) or (name == "_to_copy" and "device" in (kwargs or {})):
            self.count += 1
        return func(*args, **(kwargs or {}))


class Between(Hook):
    """Counts host reads from the end of update ``first`` to the end of update ``last``."""

    order = Order.CHECKPOINT - 1
    only_watches = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.reads = HostReads()
        self._patch = monkeypatch

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.first:
            # These read memory without a dispatched operation where the device is the CPU.
            for name in ("tolist", "numpy", "cpu", "__array__"):
                self._patch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))
            self.reads.__enter__()
        elif task.progress.updates == self.last:
            self.reads.__exit__(None, None, None)
            self._patch.undo()

    def _counted(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reads.count += 1
            return method(*args, **kwargs)

        return call


def reads_between(
    monkeypatch: pytest.MonkeyPatch, folder: Path, log_every: int = 20, **hooks: Hook
) -> int:
    """Host reads of updates 2 to 19, with the default hooks, meters and clipping."""
    between = Between(monkeypatch, 1, 19)
    run = engine(
        25, default_hooks(between=between, **hooks), 2, str(folder), log_every,
        gradients=Gradients(clip_norm=1.0, clip_value=10.0),
    )  # fmt: skip
    run()
    return between.reads.count


def test_spd_a_nothing_is_read_from_the_device_between_log_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reads_between(monkeypatch, tmp_path) == 0


def test_spd_a_averages_are_moved_on_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reads_between(monkeypatch, tmp_path, average=Average()) == 0


def test_spd_a_the_policy_skip_reads_one_flag_per_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reads_between(monkeypatch, tmp_path, non_finite=NonFinite("skip")) == 18


def test_spd_a_reads_at_a_log_point_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that the two tests above can fail."""
    assert reads_between(monkeypatch, tmp_path, log_every=10) > 0
