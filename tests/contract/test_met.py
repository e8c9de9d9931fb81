"""MET: meters. A phase measures over all its samples, and over nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from phaseloop import Accuracy, Data, Hook, Mean, Phases, Run, Task, TensorData
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs.probes import Break, BreakAt, watch
from tests.rigs.r0 import numbers, r0, train


@pytest.mark.parametrize("micro", [None, 1, 3])
def test_met_a_the_mean_is_over_samples(micro: int | None) -> None:
    # w stays 1, so the loss of a batch is the mean of its x: 1.0 over 4, then 2.5 over 2.
    xs = [1, 1, 1, 1, 2.5, 2.5]
    task = r0(
        xs, 4, w=1.0, lr=0.0, data={"micro_batch_size": micro},
        test=Data(numbers(xs), 4, micro_batch_size=micro),
        test_meters={"mean": Mean(), "theirs": torchmetrics.MeanMetric()},
    )  # fmt: skip
    outcome = train(task, sync=MeterSync())
    mean = (4 * 1.0 + 2 * 2.5) / 6
    assert mean == 1.5
    assert outcome.final["train/loss"] == 1.5
    assert outcome.final["test/loss"] == 1.5
    assert outcome.final["test/mean"] == 1.5


def test_met_a_parts_of_a_loss_are_means_over_samples_too() -> None:
    def criterion(output: torch.Tensor, target: Any) -> dict[str, torch.Tensor]:
        return {"plain": output.mean(), "double": 2 * output.mean()}

    xs = [1, 1, 1, 1, 2.5, 2.5]
    task = r0(xs, 4, w=1.0, lr=0.0, criterion=criterion, test=Data(numbers(xs), 4))
    outcome = train(task, sync=MeterSync())
    for phase in ("train", "test"):
        assert outcome.final[f"{phase}/loss/plain"] == 1.5
        assert outcome.final[f"{phase}/loss/double"] == 3.0
        assert outcome.final[f"{phase}/loss"] == 4.5


class Right(nn.Module):
    """Gives back its one-hot input, through a product that autocast does in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one


def test_met_d_a_thousand_samples_in_bfloat16_count_a_thousand() -> None:
    # bfloat16 has 8 bits of mantissa: counted in it, the sum would stop at 256.
    y = torch.randint(2, (1000,), generator=torch.Generator().manual_seed(0))
    model = Right()
    forward = watch("on_forward", lambda task: task.output.dtype)
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        train=Data(TensorData(nn.functional.one_hot(y).float(), y), 1),
        train_meters={"accuracy": Accuracy()},
        phases=Phases(epochs=1),
        precision="bfloat16",
    )
    outcome = train(task, sync=MeterSync(), forward=forward)
    meter = task.meter_sets["train"].meters["accuracy"]
    assert meter.state_dict()["count"] == 1000
    assert meter.state_dict()["count"].dtype == torch.int64
    assert outcome.final["train/accuracy"] == 1.0
    assert set(forward.seen) == {torch.float32}  # the loss and the meters see at least float32


class Counted(Hook):
    """At each phase's end: its name, how many samples each meter counted, and their values."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, int, int, float]] = []

    def on_phase_end(self, task: Task) -> None:
        meters = task.meters.meters
        ours = int(meters["accuracy"].state_dict()["count"])
        states = meters["theirs"].state_dict()["states"]
        # Micro-averaged over two classes, torchmetrics counts a sample once for each class.
        theirs = sum(int(states[name].sum()) for name in ("tp", "fp", "tn", "fn")) // 2
        loss = task.phase.metrics[f"{task.phase.name}/loss"]
        self.ends.append((task.phase.name, ours, theirs, loss))


def counting_task(folder: Path | None = None, every: int | None = 3, workers: int = 0) -> Task:
    """10 updates of 4 samples an epoch, 2 epochs, a test of 6 samples every few updates."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def meters() -> dict[str, Any]:
        return {
            "accuracy": Accuracy(),
            "theirs": torchmetrics.Accuracy("multiclass", num_classes=2, average="micro"),
        }

    return Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train=Data(TensorData(x, y), 4, workers=workers),
        test=Data(TensorData(x[:6], y[:6]), 4),
        train_meters=meters(),
        test_meters=meters(),
        phases=Phases(epochs=2, test_every_updates=every),
        run=Run(str(folder) if folder else None),
    )


def test_met_e_every_phase_starts_clean_and_tests_leave_the_train_meter_alone() -> None:
    with_tests, without = Counted(), Counted()
    sync = MeterSync()
    train(counting_task(every=3), sync=sync, counted=with_tests)
    train(counting_task(every=None), sync=sync, counted=without)
    train_end, test_end = ("train", 40, 40), ("test", 6, 6)
    # Tests after updates 3, 6, 9, the epoch's end; 12, 15, 18, the end.
    epoch = [test_end] * 3 + [train_end, test_end]
    assert [end[:3] for end in with_tests.ends] == epoch * 2
    assert [end[:3] for end in without.ends] == [train_end, test_end] * 2
    losses = [
        [loss for name, _, _, loss in hook.ends if name == "train"]
        for hook in (with_tests, without)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("at", [1, 7, 9, 10, 11, 17, 19])
def test_met_e_a_resumed_epochs_meter_covers_the_whole_epoch(tmp_path: Path, at: int) -> None:
    whole = Counted()
    train(counting_task(), sync=MeterSync(), counted=whole)

    first, second = Counted(), Counted()
    hooks = {"sync": MeterSync(), "save": Checkpoint(every_updates=1)}
    with pytest.raises(Break):
        train(counting_task(tmp_path), **hooks, counted=first, stop=BreakAt(at))
    task = counting_task(tmp_path)
    train(task, **hooks, counted=second)
    assert task.resumed
    assert first.ends + second.ends == whole.ends


def test_met_e_a_test_that_was_broken_off_is_measured_from_its_start(tmp_path: Path) -> None:
    class BreakInTest(Hook):
        def on_step(self, task: Task) -> None:
            if not task.train:
                raise Break

    whole = Counted()
    train(counting_task(), sync=MeterSync(), counted=whole)
    hooks = {"sync": MeterSync(), "save": Checkpoint(every_updates=1)}
    with pytest.raises(Break):
        train(counting_task(tmp_path), **hooks, stop=BreakInTest())
    again = Counted()
    train(counting_task(tmp_path), **hooks, counted=again)
    assert again.ends == whole.ends  # the first test came after update 3, and no phase had ended


def test_met_e_state_in_a_checkpoint_is_that_of_the_moment(tmp_path: Path) -> None:
    task = counting_task(tmp_path)
    at_saving = watch("on_step", lambda task: task.meter_sets["train"].compute())
    with pytest.raises(Break):
        train(task, save=Checkpoint(every_updates=1), values=at_saving, stop=BreakAt(7))
    resumed = counting_task(tmp_path)
    values = watch("on_resume", lambda task: task.meter_sets["train"].compute())
    train(resumed, values=values)
    assert values.seen == at_saving.seen[-1:]
