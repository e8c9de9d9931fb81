"""DATA: what a sample is, what a test phase may change, and what happens to empty batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from phaseloop import Data, DataError, Phases, Run, Task, TensorData
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs import equal, r1, ranks
from tests.rigs.probes import Break, BreakAt, DrawData, IndexData, ModeProbe, watch
from tests.rigs.r0 import numbers, r0, train, weight

# More workers than cores is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# --- DATA-a ---


def draws_by_epoch(epochs: int = 2, seed: int = 0, **data: Any) -> list[dict[int, Any]]:
    """Per epoch, dataset index to that sample's draws from Python, NumPy and torch."""
    seen: list[dict[int, Any]] = [{} for _ in range(epochs)]

    def step(task: Task) -> None:
        batch = task.next_batch()
        for index, row in zip(batch.indices.tolist(), batch.data.tolist(), strict=True):
            assert index not in seen[task.progress.epoch - 1]
            seen[task.progress.epoch - 1][index] = tuple(row)
        task.backward(task.model.w * 1.0)
        task.update()
        # What training draws between two batches must not reach the samples.
        random.random(), np.random.rand(), torch.rand(())

    train(r0([0], 1, train=Data(DrawData(8), 4, **data), epochs=epochs, seed=seed, train_step=step))
    return seen


def by_position(epoch: dict[int, Any]) -> list[Any]:
    """The draws in the order in which the samples came."""
    return list(epoch.values())


@pytest.mark.parametrize("workers", [2, 4])
def test_data_a_draws_do_not_depend_on_workers(workers: int) -> None:
    assert draws_by_epoch(workers=workers) == draws_by_epoch(workers=0)


@pytest.mark.parametrize("cut", [{"batch_size": 8}, {"micro_batch_size": 1}, {"accumulate": 3}])
def test_data_a_nor_on_how_a_batch_is_cut(cut: dict[str, int]) -> None:
    size = cut.pop("batch_size", 4)
    whole = draws_by_epoch()

    def other() -> list[dict[int, Any]]:
        seen: list[dict[int, Any]] = [{}, {}]

        def step(task: Task) -> None:
            batch = task.next_batch()
            for index, row in zip(batch.indices.tolist(), batch.data.tolist(), strict=True):
                seen[task.progress.epoch - 1][index] = tuple(row)
            task.backward(task.model.w * 1.0)
            task.update()

        train(r0([0], 1, train=Data(DrawData(8), size, **cut), epochs=2, train_step=step))
        return seen

    assert other() == whole


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_data_a_every_sample_and_every_epoch_draws_anew(workers: int, shuffle: bool) -> None:
    epochs = draws_by_epoch(workers=workers, shuffle=shuffle)
    for column in range(3):
        values = [row[column] for epoch in epochs for row in epoch.values()]
        assert len(set(values)) == len(values) == 16


def test_data_a_draws_depend_on_the_seed() -> None:
    one, other = draws_by_epoch(seed=0), draws_by_epoch(seed=1)
    assert not set(by_position(one[0])) & set(by_position(other[0]))


@pytest.mark.parametrize("workers", [0, 2])
def test_data_a_a_test_set_draws_the_same_each_time(workers: int) -> None:
    seen: list[list[Any]] = []

    def step(task: Task) -> None:
        batch = task.next_batch()
        if task.train:
            task.backward(task.model.w * 1.0)
            task.update()
        elif task.phase.position == 0:
            seen.append(batch.data.tolist())
        else:
            seen[-1] += batch.data.tolist()

    train(r0([1, 2], 1, epochs=2, train_step=step, test=Data(DrawData(8), 3, workers=workers)))
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert len({tuple(row) for row in seen[0]}) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_data_a_reading_leaves_the_training_s_own_generators_alone(workers: int) -> None:
    def draws(dataset: Any) -> list[list[float]]:
        probe = watch("on_step", lambda task: r1.draws())

        def step(task: Task) -> None:
            task.next_batch()
            task.backward(task.model.w * 1.0)
            task.update()

        task = r0([0], 1, train=Data(dataset, 2, workers=workers), train_step=step)
        train(task, probe=probe)
        return probe.seen

    # Read by the fast path, a set in memory needs no seeds: nothing is set that could stay set.
    untouched = draws(TensorData(torch.zeros(8)))
    assert draws(DrawData(8)) == untouched
    assert draws(IndexData(8)) == untouched


# --- DATA-b ---


def test_data_b_a_set_that_fills_no_batch_is_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"data\.train.*\b3\b.*\b4\b.*drop_last"):
        r0([1, 2, 3], 4, data={"drop_last": True})


@pytest.mark.parametrize("drop_last", [False, True])
def test_data_b_an_empty_set_is_an_error_by_name(drop_last: bool) -> None:
    with pytest.raises(DataError, match=r"data\.train.*empty.*\b0\b"):
        r0([], 4, data={"drop_last": drop_last})
    with pytest.raises(DataError, match=r"data\.test: .*empty"):
        r0([1], 1, test=Data(numbers([]), 4))
    with pytest.raises(DataError, match=r"data\.test\.second: .*empty"):
        r0([1], 1, test={"first": Data(numbers([1]), 1), "second": Data(numbers([]), 1)})


def test_data_b_drop_last_leaves_out_only_what_is_short() -> None:
    task = r0([1, 3, 10], 2, data={"drop_last": True})
    assert train(task).updates == 1
    assert weight(task) == -2.0


# --- DATA-d ---


class DrawsInEval(nn.Module):
    """Draws from torch's generator also in a test, as a sampling layer does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def trace(
    test: bool, every: int | None, test_workers: int = 0, workers: int = 0, **kind: Any
) -> Any:
    """Ids and loss of every update, and the final parameters and buffers."""
    torch.manual_seed(0)
    norm = kind.get("norm", nn.BatchNorm1d)(8)
    layers = [nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)]
    if kind.get("sampling"):
        layers.insert(2, DrawsInEval())
    model = nn.Sequential(*layers)
    task = r1.make_task(
        None, model=model, epochs=2, augment=True, workers=workers, test=test,
        phases={"test_every_updates": every, "test_every_epochs": 1 if test else None},
    )  # fmt: skip
    for data in task.test_data.values():
        data.workers = test_workers

    def look(task: Task) -> Any:
        if task.train:
            return task.batch.indices.tolist(), float(task.loss), r1.draws()
        return None

    probe = watch("on_step", look)
    outcome = train(task, probe=probe, sync=MeterSync())
    seen = [entry for entry in probe.seen if entry is not None]
    tests = len(probe.seen) - len(seen)
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"seen": seen, "state": state, "train": outcome.final["train/loss"]}, tests


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_data_d_testing_changes_nothing_of_the_training(workers: int, sampling: bool) -> None:
    never, no_tests = trace(False, None, sampling=sampling)
    often, tests = trace(True, 3, workers, 2 - workers, sampling=sampling)
    assert no_tests == 0
    # After updates 3, 6, 9, 10, 12, 15, 18, 20; two batches each.
    assert tests == 16
    assert often == never


def _never_and_often() -> list[Any]:
    return [trace(False, None, norm=nn.LayerNorm), trace(True, 3, norm=nn.LayerNorm)]


def test_data_d_of_three_processes_where_the_order_of_a_sum_shows() -> None:
    for (never, no_tests), (often, tests) in ranks.results(_never_and_often, processes=3):
        assert (no_tests, tests) == (0, 16)  # as above
        assert often == never


# --- DATA-e ---


class Flags(nn.Module):
    """A network with a frozen and a living batch norm, and probes before and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.BatchNorm1d(8)
        self.living = nn.BatchNorm1d(8)
        self.probe = ModeProbe()
        self.last = nn.Linear(8, 2)
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.probe(self.living(self.frozen(self.first(x)))))


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def frozen_task(folder: Path | None, **options: Any) -> Task:
    torch.manual_seed(0)
    return r1.make_task(
        folder, model=Flags(), epochs=2, test=True, phases={"test_every_updates": 3}, **options
    )


def test_data_e_train_flags_after_a_test_are_as_before() -> None:
    task = frozen_task(None)
    model = task.bare_model
    before = flags(model)
    assert not before["frozen"]
    assert before["living"]
    probe = watch("on_forward", lambda task: (task.train, flags(model)))
    train(task, probe=probe)
    assert {entry[0] for entry in probe.seen} == {True, False}
    for in_training, seen in probe.seen:
        assert seen == (before if in_training else dict.fromkeys(before, False))
    assert flags(model) == before
    # The module itself saw the same, with gradients in training only.
    assert [(mode, grad) for mode, grad, _ in model.probe.seen] == [
        (in_training, in_training) for in_training, _ in probe.seen
    ]
    assert not model.frozen.running_mean.any()
    assert model.living.running_mean.any()


@pytest.mark.parametrize("in_test", [False, True])
def test_data_e_flags_are_put_back_after_an_error(in_test: bool) -> None:
    task = frozen_task(None)
    before = flags(task.bare_model)

    def fail(task: Task) -> None:
        if task.train is not in_test:
            raise Break

    with pytest.raises(Break):
        train(task, fail=watch("on_forward", fail))
    assert flags(task.bare_model) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("at", [2, 3, 10, 14])
def test_data_e_a_frozen_batch_norm_stays_frozen_over_a_resume(tmp_path: Path, at: int) -> None:
    whole = frozen_task(None)
    train(whole)
    save = Checkpoint(every_updates=1)
    with pytest.raises(Break):
        train(frozen_task(tmp_path), save=save, stop=BreakAt(at))
    resumed = frozen_task(tmp_path)
    resumed.bare_model.train()  # what a user who builds the model anew may forget
    train(resumed, save=save)
    assert resumed.resumed
    assert flags(resumed.bare_model) == flags(whole.bare_model)
    for name, value in whole.bare_model.state_dict().items():
        assert torch.equal(resumed.bare_model.state_dict()[name], value), name


def test_data_e_flags_in_a_checkpoint_of_a_test_phase_are_those_of_training(
    tmp_path: Path,
) -> None:
    class BreakInTest(Checkpoint):
        def on_step(self, task: Task) -> None:
            if not task.train:
                self._save(task)
                raise Break

    before = flags(frozen_task(None).bare_model)
    with pytest.raises(Break):
        train(frozen_task(tmp_path), stop=BreakInTest())
    resumed = frozen_task(tmp_path)
    start = watch("on_start", lambda task: flags(task.bare_model))
    train(resumed, start=start)
    assert resumed.resumed
    assert start.seen == [before]


# --- DATA-f ---


def none_for(bad: set[int]) -> Callable[[list[Any]], Any]:
    """A collate function that gives None for a batch that holds one of the samples ``bad``."""

    def collate(samples: list[Tensor]) -> Any:
        return None if bad & {int(sample) for sample in samples} else default_collate(samples)

    return collate


def events(folder: Path) -> list[dict[str, Any]]:
    return [line for line in equal.rows(folder) if "event" in line]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_f_none_from_collate_is_skipped_and_recorded(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(IndexData(10), 1, shuffle=False, collate=none_for({3}), workers=workers)
    task = r0([0], 1, train=data, run=Run(str(tmp_path)))
    outcome = train(task, sync=MeterSync(), file=MetricsFile())
    assert outcome.updates == 9
    assert weight(task) == -sum(n for n in range(10) if n != 3)
    assert math.isfinite(outcome.final["train/loss"])
    assert task.progress.skipped == 1
    (event,) = events(tmp_path)
    assert event["event"] == "skip"
    assert event["update"] == 4  # the window that would have been update 4
    assert "no micro-batch" in event["reason"]
    assert any("update 4 was skipped" in r.getMessage() for r in caplog.records)


def step_without(bad: set[int]) -> Callable[[Task], None]:
    """A step that returns at once for a batch that holds one of the samples ``bad``."""

    def step(task: Task) -> None:
        batch = task.next_batch()
        if bad & set(batch.indices.tolist()):
            return
        task.backward(task.criterion(task.forward(batch.input), None))
        task.update()

    return step


@pytest.mark.parametrize("log_every", [1, 10])
def test_data_f_nothing_from_the_step_is_skipped_and_recorded(
    tmp_path: Path, log_every: int
) -> None:
    run = Run(str(tmp_path), log_every=log_every)
    task = r0(range(10), 1, run=run, train_step=step_without({3}))
    outcome = train(task, sync=MeterSync(), file=MetricsFile())
    assert outcome.updates == 9
    assert weight(task) == -sum(n for n in range(10) if n != 3)
    assert math.isfinite(outcome.final["train/loss"])
    assert [event["event"] for event in events(tmp_path)] == ["skip"]


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}])
@pytest.mark.parametrize("by", ["collate", "step"])
def test_data_f_a_window_with_a_hole_is_the_mean_over_the_rest(by: str, bad: set[int]) -> None:
    # Batches of 3 in micro-batches of 1; the second batch is whole.
    xs = range(6)
    if by == "collate":
        data = Data(IndexData(6), 3, micro_batch_size=1, shuffle=False, collate=none_for(bad))
        task = r0([0], 1, train=data)
    else:
        task = r0(xs, 3, data={"micro_batch_size": 1}, train_step=step_without(bad))
    outcome = train(task)
    rest = [x for x in range(3) if x not in bad]
    assert outcome.updates == 2
    assert weight(task) == pytest.approx(-sum(rest) / len(rest) - (3 + 4 + 5) / 3, abs=1e-6)


def test_data_f_a_length_in_updates_counts_those_that_were_made() -> None:
    data = Data(IndexData(10), 1, shuffle=False, collate=none_for({3}))
    task = r0([0], 1, train=data, phases=Phases(updates=12))
    assert train(task).updates == 12
    assert task.progress.epoch == 2
    assert task.progress.windows == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_data_f_none_in_a_test_set_is_left_out(workers: int) -> None:
    data = Data(IndexData(4), 1, collate=none_for({3}), workers=workers)
    task = r0([0], 1, w=1.0, test=data)
    outcome = train(task, sync=MeterSync())
    assert outcome.final["test/loss"] == pytest.approx((0 + 1 + 2) / 3)
