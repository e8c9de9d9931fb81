"""GA by all that training data may be: sizes by epoch, mixes, samplers, limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import (
    Data,
    DataError,
    Mix,
    Phases,
    Sampler,
    Schedule,
    Source,
    Task,
    TensorData,
    Warmup,
)
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.schedules import constant
from phaseloop.hooks.learning_rate import LearningRate
from tests.contract.test_data_sources import Points
from tests.rigs import r1
from tests.rigs.probes import watch
from tests.rigs.r0 import numbers, r0, train

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")


def test_ga_a_batch_sizes_by_epoch() -> None:
    sizes = watch("on_step", lambda task: (task.progress.epoch, task.batch.size))
    data = {"batch_size": {1: 4, 3: 10, 4: 3}}
    task = r0([0], 1, train=Data(numbers(range(10)), **data), epochs=5)
    outcome = train(task, sizes=sizes)
    expected = {1: [4, 4, 2], 2: [4, 4, 2], 3: [10], 4: [3, 3, 3, 1], 5: [3, 3, 3, 1]}
    assert sizes.seen == [(epoch, size) for epoch, row in expected.items() for size in row]
    assert outcome.updates == task.plan.updates == 15
    assert task.plan.epochs == 5
    assert [task.plan.windows_in(epoch) for epoch in range(1, 6)] == [3, 3, 1, 4, 4]


def test_ga_a_micro_batches_go_with_the_batch_size() -> None:
    pieces = watch("on_step", lambda task: len(task.accumulator.window.pieces))
    data = Data(numbers(range(12)), {1: 4, 2: 12}, micro_batch_size=4)
    train(r0([0], 1, train=data, epochs=2), pieces=pieces)
    assert pieces.seen == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("updates", [1, 6, 7, 9, 15])
def test_ga_a_a_length_in_updates_over_changing_epochs(updates: int) -> None:
    data = Data(numbers(range(10)), {1: 4, 3: 10, 4: 3})
    task = r0([0], 1, train=data, phases=Phases(updates=updates))
    assert train(task).updates == updates
    # Whole epochs of 3, 3, 1, 4 and 4 updates.
    assert task.plan.epochs == {1: 1 / 3, 6: 2, 7: 3, 9: 3.5, 15: 5}[updates]


def test_ga_a_schedules_are_spread_over_the_exact_number_of_updates() -> None:
    asked: list[float] = []

    def build(base: float, *_: Any) -> Any:
        def curve(where: float) -> float:
            asked.append(where)
            return base

        return curve

    data = Data(numbers(range(10)), {1: 4, 2: 10})
    train(r0([0], 1, train=data, epochs=3, schedule=Schedule(build)), rate=LearningRate())
    assert asked[-5:] == [0.0, 1 / 5, 2 / 5, 3 / 5, 4 / 5]


def test_ga_a_a_warm_up_in_epochs_ends_where_they_end() -> None:
    """Epochs of 10, 5 and 5 updates: a warm-up of one is 10 updates long, and not 20 / 3."""
    task = r1.make_task(
        None, train=Data(Points(), {1: 4, 2: 8}), epochs=3,
        schedule=Schedule(constant(), warmup=Warmup(start=0.0, epochs=1)),
    )  # fmt: skip
    rates = watch("on_update", lambda task: task.optimizers["optimizer"].param_groups[0]["lr"])
    train(task, rates=rates, hook=LearningRate())
    expected = [0.1 * n / 10 for n in range(10)] + [0.1] * 10
    assert rates.seen == pytest.approx(expected)


def test_ga_b_the_warning_goes_by_the_largest_size(caplog: pytest.LogCaptureFixture) -> None:
    train(r0([0], 1, train=Data(numbers(range(6)), {1: 3, 2: 8}), epochs=2))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "6 samples" in warning
    assert "batch_size 8" in warning


def test_data_b_drop_last_goes_by_the_largest_size() -> None:
    data = Data(numbers(range(6)), {1: 3, 2: 8}, drop_last=True)
    with pytest.raises(DataError, match=r"data\.train: 6 samples.*batch of 8.*drop_last"):
        r0([0], 1, train=data)


# --- GA-e ---


def labelled(count: int) -> TensorData:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    data = TensorData(x, (x.sum(1) > 0).long())
    data.targets = data.tensors[1]  # type: ignore[attr-defined]
    return data


INVARIANT: dict[str, Any] = {
    "mix": lambda: Data(Mix({"a": Source(labelled(30), 2.0), "b": labelled(11)}), 12),
    "balanced": lambda: Data(labelled(41), 12, sampler=Sampler("balanced")),
    "limit": lambda: Data(labelled(53), 12, limit=41),
    "sizes by epoch": lambda: Data(labelled(41), {1: 12, 2: 20}),
}


CUTS: list[dict[str, int]] = [{"micro_batch_size": 2}, {"micro_batch_size": 5}, {"accumulate": 3}]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", INVARIANT)
def test_ga_e_micro_batches_do_not_change_the_training(kind: str, cut: dict[str, int]) -> None:
    results = []
    for options in ({}, cut):
        data = INVARIANT[kind]()
        for name, value in options.items():
            setattr(data, name, value)
        model = r1.network()
        model[2] = nn.Identity()
        task = Task(
            model=model, criterion=nn.CrossEntropyLoss(), train=data, phases=Phases(epochs=2),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            precision="float64",
        )  # fmt: skip
        outcome = train(task)
        last = 20 if kind == "sizes by epoch" else 12
        samples = 42 if kind == "balanced" else 41  # two classes, 21 of each
        assert outcome.updates == math.ceil(samples / 12) + math.ceil(samples / last)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", INVARIANT)
def test_ga_e_processes_share_the_same_batches(kind: str, world: int) -> None:
    """What each rank gets, put together, is what one process gets: see also the plan's tests."""

    def batches(world: int) -> list[list[list[int]]]:
        loaders = [
            Loader(INVARIANT[kind](), train=True, source=0, seed=1, device=CPU,
                   world_size=world, rank=rank)
            for rank in range(world)
        ]  # fmt: skip
        found: list[list[list[int]]] = []
        for epoch in (1, 2):
            ranks = [[b for _, b in loader.batches(epoch, 0, 0)] for loader in loaders]
            found.append(
                [
                    [int(i) for batch in parts if batch.weight for i in batch.indices]
                    for parts in zip(*ranks, strict=True)
                ]
            )
        return found

    assert batches(world) == batches(1)
