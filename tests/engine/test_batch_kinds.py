"""Batches of unusual kind through a whole training: packed, nested, dataclasses; and to_device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import Dataset

from phaseloop import Data, Phases, Task
from tests.rigs.probes import watch
from tests.rigs.r0 import train


class Sequences(Dataset[Any]):
    """Sequences of 1 to 4 steps of 3 numbers, and whether their sum is positive."""

    def __init__(self, count: int = 12) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randn(1 + n % 4, 3, generator=generator) for n in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], (self.rows[index].sum() > 0).long()


@dataclass
class Sample:
    """A batch as a dataclass."""

    input: Any
    target: Tensor
    names: list[str]


@dataclass
class NoInput:
    """A dataclass whose fields are called otherwise."""

    steps: Any
    label: Tensor


def packed(samples: list[Any]) -> tuple[PackedSequence, Tensor]:
    rows, labels = zip(*samples, strict=True)
    return pack_sequence(rows, enforce_sorted=False), torch.stack(labels)


def as_dataclass(samples: list[Any]) -> Sample:
    rows, labels = packed(samples)
    return Sample(rows, labels, ["name"] * len(samples))


def nested(samples: list[Any]) -> dict[str, Any]:
    rows, labels = packed(samples)
    return {"input": {"parts": [rows], "lengths": torch.tensor([len(s[0]) for s in samples])},
            "target": labels}  # fmt: skip


class Recurrent(nn.Module):
    """An LSTM over a packed sequence, however it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            (batch,) = batch["parts"]
        if isinstance(batch, NoInput):
            batch = batch.steps
        assert isinstance(batch, PackedSequence)
        assert batch.data.dtype == self.head.weight.dtype
        output, lengths = pad_packed_sequence(self.lstm(batch)[0])
        last: Tensor = output[lengths - 1, torch.arange(len(lengths))]
        out: Tensor = self.head(last)
        return out


def results(collate: Any, **options: Any) -> list[Tensor]:
    """Final parameters after a training with this collate function."""
    precision = options.pop("precision", "float32")
    torch.manual_seed(0)
    model = Recurrent()
    task = Task(
        model=model,
        criterion=options.pop("criterion", nn.CrossEntropyLoss()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train=Data(Sequences(), 4, collate=collate, **options),
        test=Data(Sequences(5), 2, collate=collate),
        phases=Phases(epochs=2),
        precision=precision,
    )
    assert train(task).updates == 6
    return [p.detach() for p in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("collate", [as_dataclass, nested])
def test_wrapped_or_not_the_training_is_the_same(collate: Any, precision: str) -> None:
    plain = results(packed, precision=precision)
    assert str(plain[0].dtype) == f"torch.{precision}"
    assert_same(results(collate, precision=precision), plain)
    assert_same(results(collate, precision=precision, workers=1), plain)


def no_input(samples: list[Any]) -> NoInput:
    return NoInput(*packed(samples))


def in_order(task: Task) -> None:
    """A step for a batch that is a dataclass of its own names."""
    batch = task.next_batch()
    loss = task.criterion(task.forward(batch.input), batch.data.label)
    if task.train:
        task.backward(loss)
        task.update()


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_dataclass_without_an_input_is_the_input(precision: str) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    task = Task(
        model=model, criterion=nn.CrossEntropyLoss(), train_step=in_order,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train=Data(Sequences(), 4, collate=no_input), phases=Phases(epochs=2),
        precision=precision,
    )  # fmt: skip
    targets = watch("on_forward", lambda task: task.batch.target)
    train(task, targets=targets)
    assert set(targets.seen) == {None}
    assert_same([p.detach() for p in model.parameters()], results(packed, precision=precision))


def test_a_users_own_way_to_the_device_is_taken() -> None:
    calls: list[Any] = []

    def move(batch: Any, device: torch.device) -> Any:
        calls.append((type(batch).__name__, device))
        return batch.input.to(device), batch.target.to(device)

    plain = results(packed)
    assert_same(results(as_dataclass, to_device=move), plain)
    # Six batches of training; the test set has none of it.
    assert calls == [("Sample", torch.device("cpu"))] * 6
