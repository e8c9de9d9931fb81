"""GA: batches, windows, gradients. How a batch is cut never changes the update."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    ConfigError,
    Data,
    Gradients,
    PhaseloopError,
    Phases,
    Run,
    Schedule,
    Task,
    TensorData,
)
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs.probes import watch
from tests.rigs.r0 import r0, train, weight

TEN = range(1, 11)


def test_ga_a_a_short_tail_is_divided_by_its_own_size() -> None:
    asked: list[float] = []

    def build(base: float, stretch: Any):  # type: ignore[no-untyped-def]
        def curve(where: float) -> float:
            asked.append(where)
            return base

        return curve

    task = r0(TEN, 4, data={"micro_batch_size": 1}, schedule=Schedule(build))
    outcome = train(task, learning_rate=LearningRate())
    means = [(1 + 2 + 3 + 4) / 4, (5 + 6 + 7 + 8) / 4, (9 + 10) / 2]
    assert weight(task) == -sum(means) == -18.5
    assert outcome.updates == 3
    assert asked == [0.0, 1 / 3, 2 / 3]  # the schedule moved once per update


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ga_a_batches_never_cross_an_epochs_end(shuffle: bool, drop_last: bool) -> None:
    windows: list[list[int]] = []

    def step(task: Task) -> None:
        if task.accumulator.taken == 1:
            windows.append([])
        batch = task.next_batch()
        windows[-1] += batch.indices.tolist()
        task.backward(task.criterion(task.forward(batch.input), None))
        task.update()

    data = {"micro_batch_size": 3, "shuffle": shuffle, "drop_last": drop_last}
    outcome = train(r0(TEN, 4, epochs=3, data=data, train_step=step))
    sizes = [4, 4] if drop_last else [4, 4, 2]
    assert [len(ids) for ids in windows] == sizes * 3
    assert outcome.updates == len(sizes) * 3
    for epoch in range(3):
        ids = [*chain(*windows[epoch * len(sizes) : (epoch + 1) * len(sizes)])]
        assert len(set(ids)) == len(ids) == sum(sizes)


def test_ga_b_an_epoch_smaller_than_a_batch_is_one_smaller_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = r0([1, 2, 6], 4, epochs=2)
    outcome = train(task)
    assert outcome.updates == 2
    assert weight(task) == -2 * (1 + 2 + 6) / 3
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "3 samples" in warnings[0]
    assert "batch_size 4" in warnings[0]


def test_ga_b_a_full_batch_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    train(r0([1, 2, 6, 7], 4))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_ga_c_pieces_of_unequal_size_weigh_by_their_size() -> None:
    task = r0(TEN, 10, data={"micro_batch_size": 4})
    sizes = watch("on_backward", lambda task: task.batch.size)
    train(task, sizes=sizes)
    assert sizes.seen == [4, 3, 3]
    assert weight(task) == pytest.approx(-sum(TEN) / 10, abs=1e-6)  # -5.5


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 7, 10, 25])
def test_ga_c_any_number_of_pieces_gives_the_update_of_one(pieces: int) -> None:
    task = r0(TEN, 10, data={"accumulate": pieces})
    outcome = train(task)
    assert outcome.updates == 1
    assert weight(task) == pytest.approx(-5.5, abs=1e-6)


def masked_step(kind: type) -> object:
    """A step whose loss is the mean over the positive samples only, weighted by their count."""

    def step(task: Task) -> None:
        batch = task.next_batch()
        valid = batch.input > 0
        output = task.forward(batch.input)
        loss = (output * valid).sum() / valid.sum().clamp(min=1)
        task.measure(loss, output, None)
        count = valid.sum()
        task.backward(loss, weight=count if kind is Tensor else kind(count))
        task.update()

    return step


@pytest.mark.parametrize("kind", [Tensor, float, int])
@pytest.mark.parametrize("micro", [1, 2, 3, 4, 6])
def test_ga_c_explicit_weights_make_the_mean_over_valid_elements(kind: type, micro: int) -> None:
    # Cut into pieces of 2, the middle one has no valid element; of 1, four have none.
    xs = [3, 5, -1, -1, 10, -1]
    task = r0(xs, 6, data={"micro_batch_size": micro}, train_step=masked_step(kind))
    outcome = train(task)
    assert outcome.updates == 1
    assert weight(task) == pytest.approx(-(3 + 5 + 10) / 3, abs=1e-6)


@pytest.mark.parametrize("kind", [Tensor, float])
def test_ga_c_a_window_without_a_valid_element_gives_no_nan(kind: type) -> None:
    task = r0([-1, -1, 4, -1], 2, data={"micro_batch_size": 1}, train_step=masked_step(kind))
    train(task)
    assert weight(task) == -4.0


def test_ga_c_weights_given_for_half_of_a_window_are_an_error() -> None:
    def step(task: Task) -> None:
        batch = task.next_batch()
        loss = task.criterion(task.forward(batch.input), None)
        task.backward(loss, weight=1.0 if task.accumulator.taken == 1 else None)
        task.update()

    with pytest.raises(PhaseloopError, match="weight"):
        train(r0([1, 2], 2, data={"micro_batch_size": 1}, train_step=step))


def test_ga_d_gradients_are_clipped_once_per_window() -> None:
    task = r0([4, -2], 2, data={"micro_batch_size": 1}, gradients=Gradients(clip_norm=1.0))
    norms = watch("on_update", lambda task: float(task.gradient_norm))
    train(task, norms=norms)
    mean = (4 - 2) / 2
    # clip_grad_norm_ divides by norm + 1e-6. Clipped at each micro-batch, w would be 0.
    assert weight(task) == pytest.approx(-mean / (mean + 1e-6), abs=1e-7)
    assert weight(task) == pytest.approx(-1, abs=1e-5)
    assert norms.seen == [mean]  # of before clipping


def test_ga_d_a_bound_by_value_is_applied_once_per_window() -> None:
    task = r0([4, -2], 2, data={"micro_batch_size": 1}, gradients=Gradients(clip_value=0.75))
    train(task)
    assert weight(task) == -0.75


def test_ga_d_hooks_see_gradients_that_are_averaged_and_not_yet_clipped() -> None:
    task = r0([4, -2, 3], 3, data={"micro_batch_size": 1}, gradients=Gradients(clip_norm=1.0))
    before = watch("on_gradients", lambda task: float(task.bare_model.w.grad))
    train(task, before=before)
    assert before.seen == [pytest.approx((4 - 2 + 3) / 3)]


def classifier() -> nn.Module:
    """R1 without dropout."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("cut", [{"micro_batch_size": n} for n in (1, 2, 5)] + [{"accumulate": 5}])
def test_ga_e_micro_batches_do_not_change_the_training(make: type, cut: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(41, 4, generator=generator)
    data = TensorData(x, (x.sum(1) > 0).long())
    results = []
    for options in ({}, cut):
        model = classifier()
        momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
        task = Task(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=lambda model, momentum=momentum: make(model.parameters(), lr=0.1, **momentum),
            train=Data(data, 12, **options),
            phases=Phases(epochs=2),
            precision="float64",
        )
        outcome = train(task)
        assert outcome.updates == 2 * math.ceil(41 / 12)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert results[0].dtype == torch.float64
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_ga_f_the_reported_loss_is_the_mean_over_samples(micro: int | None, every: int) -> None:
    # lr 0: w stays 1, so each sample's loss is x.
    task = r0(TEN, 4, w=1.0, lr=0.0, data={"micro_batch_size": micro}, run=Run(log_every=every))
    rows = watch("on_step", lambda task: task.recorder.due and task.recorder.row()["loss"])
    outcome = train(task, rows=rows, sync=MeterSync())
    batches = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    expected = []
    for end in range(every, 4, every):
        seen = [*chain(*batches[end - every : end])]
        expected.append(pytest.approx(sum(seen) / len(seen)))
    assert [value for value in rows.seen if value is not False] == expected
    assert outcome.final["train/loss"] == pytest.approx(sum(TEN) / 10)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_ga_f_a_loss_of_one_element_may_have_any_shape(shape: tuple[int, ...]) -> None:
    task = r0([2, 4], 2, w=1.0, criterion=lambda output, _: output.mean().reshape(shape))
    outcome = train(task, sync=MeterSync())
    assert outcome.final["train/loss"] == 3.0
    assert weight(task) == 1.0 - 3.0


def test_ga_f_a_loss_that_is_not_reduced_is_an_error_that_says_so() -> None:
    task = r0([2, 4], 2, criterion=lambda output, _: output)
    with pytest.raises(ConfigError, match=r"criterion: .*\[2\].*mean"):
        train(task)
