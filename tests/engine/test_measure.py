"""Measure with a weight: the mean over all elements, in meters and rows; read at log points."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phaseloop import ConfigError, Data, Run, Task, TensorData
from phaseloop.engine.meters import Mean
from phaseloop.engine.recorder import Recorder
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs.probes import watch
from tests.rigs.r0 import r0, train

# Loss and number of tokens of four batches; the third has none.
LOSSES = [1.0, 2.5, 7.0, 4.0]
TOKENS = [4, 2, 0, 3]
MEAN = sum(a * b for a, b in zip(LOSSES, TOKENS, strict=True)) / sum(TOKENS)


def step(kind: Any, parts: bool = False) -> Any:
    def token_step(task: Task) -> None:
        batch = task.next_batch()
        loss = task.forward(batch.input).mean() * 0 + batch.input.mean()
        tokens = TOKENS[LOSSES.index(float(batch.input))]
        weight = torch.tensor(tokens) if kind is Tensor else kind(tokens)
        task.measure(loss, None, None, {"half": loss / 2} if parts else None, weight=weight)
        if task.train:
            task.backward(loss, weight=weight)
            task.update()

    return token_step


@pytest.mark.parametrize("kind", [Tensor, int, float])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_loss_is_the_mean_over_all_elements(kind: Any, every: int) -> None:
    task = r0(
        LOSSES, 1, train_step=step(kind, parts=True), run=Run(log_every=every),
        test=Data(TensorData(torch.tensor(LOSSES)), 1),
    )  # fmt: skip
    rows = watch("on_step", lambda task: task.recorder.row() if task.recorder.due else None)
    final = train(task, rows=rows, sync=MeterSync()).final
    assert final["train/loss"] == final["test/loss"] == pytest.approx(MEAN)
    assert final["train/loss/half"] == pytest.approx(MEAN / 2)
    for end, row in enumerate(rows.seen[: len(LOSSES)], 1):
        if row is None:
            continue
        seen = range(end - every, end)
        total = sum(TOKENS[n] for n in seen)
        if total:
            mean = sum(LOSSES[n] * TOKENS[n] for n in seen) / total
            assert row["loss"] == pytest.approx(mean)
        else:  # nothing that counts was seen
            assert "loss" not in row


def test_without_a_weight_samples_count() -> None:
    """As ever: batches of 2 and 1 samples."""

    def plain(task: Task) -> None:
        loss = task.forward(task.next_batch().input).mean()
        task.measure(loss, None, None)
        task.backward(loss)
        task.update()

    task = r0([1.0, 3.0, 8.0], 2, w=1.0, lr=0.0, train_step=plain)
    assert train(task, sync=MeterSync()).final["train/loss"] == pytest.approx(4.0)


def test_a_weight_of_several_elements_is_an_error() -> None:
    def wrong(task: Task) -> None:
        loss = task.forward(task.next_batch().input).mean()
        task.measure(loss, None, None, weight=torch.ones(2))

    with pytest.raises(ConfigError, match=r"measure\(weight=\.\.\.\): .*\[2\]"):
        train(r0([1.0], 1, train_step=wrong))


def test_a_weight_on_the_device_is_not_read_between_log_points() -> None:
    meta = torch.device("meta")  # a device whose values cannot be read at all
    mean = Mean().to(meta)
    mean.add(torch.ones((), device=meta), torch.ones((), device=meta))
    recorder = Recorder(every=4)
    for _ in range(3):
        recorder.add("loss", torch.ones((), device=meta), torch.ones((), device=meta))
        recorder.begin_step()


def test_the_recorder_keeps_weights_over_a_save_and_when_it_compacts() -> None:
    recorder = Recorder(every=10**6)
    for n in range(3000):
        recorder.add("x", torch.tensor(float(n % 7)), torch.tensor(n % 3))
        recorder.add("void", torch.tensor(float(n)), torch.tensor(0))
    again = Recorder(every=10**6)
    again.load_state_dict(recorder.state_dict())
    expected = sum((n % 7) * (n % 3) for n in range(3000)) / sum(n % 3 for n in range(3000))
    for one in (recorder, again):
        row = one.row()
        assert row["x"] == pytest.approx(expected)
        assert "void" not in row
