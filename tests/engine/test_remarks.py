"""Remarks beneath an error: what torch was given, whatever it is; the error stays the same."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Phases, Task
from phaseloop.engine.remarks import looks
from tests.rigs import r0


def ragged() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])


class Secretive:
    """Does not say what it is."""

    @property
    def dtype(self) -> Any:
        raise ValueError("not told")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "float64 [2, 3]"),
        ({"x": torch.zeros(1), 2: [1, torch.zeros(4).long()]},
         "{x: float32 [1], 2: (int, int64 [4])}"),
        (None, "NoneType"),
        ([Secretive(), torch.zeros(())], "(Secretive, float32 [])"),
    ],
)  # fmt: skip
def test_how_a_value_looks(value: Any, said: str) -> None:
    assert looks(value) == said


def test_a_tensor_without_a_shape_is_named() -> None:
    """Its ``shape`` is an error of its own."""
    with pytest.raises(RuntimeError):
        _ = ragged().shape
    assert looks((ragged(), torch.zeros(2))) == "(Tensor, float32 [2])"


class Full(nn.Linear):
    """Is out of memory whatever it is given."""

    def forward(self, x: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory is left")


def into_it(task: Task) -> None:
    task.next_batch()
    task.forward(ragged())


into_it.whole_model_forward = True  # type: ignore[attr-defined]


def test_the_error_stays_the_one_that_it_is() -> None:
    """Who catches it by its type, as hook fit_memory does, finds it; the remark is its note."""
    task = Task(
        model=Full(1, 1),
        criterion=r0.mean_output,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        train=Data(r0.numbers(range(4)), 2),
        phases=Phases(epochs=1),
        train_step=into_it,
    )
    with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
        r0.train(task)
    assert caught.value.__notes__ == ["phaseloop: the model was called with (Tensor)"]  # type: ignore[attr-defined]
