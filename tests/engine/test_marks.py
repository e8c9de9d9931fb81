"""Marks: a sum and a sum of squares tell whether all processes have the same number."""

from __future__ import annotations

import os

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phaseloop.engine.backends import Backend, Ddp
from phaseloop.engine.marks import are_same, mark, with_square
from tests.rigs import ranks

NUMBERS = st.integers(0, 5) | st.integers(0, 2**20 - 1)


@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_only_equal_numbers_pass(numbers: list[int]) -> None:
    total, squares = (sum(column) for column in zip(*map(with_square, numbers), strict=True))
    assert are_same(total, squares, len(numbers)) is (len(set(numbers)) == 1)


@given(st.text())
def test_marks_of_two_million_processes_fit_an_int64(text: str) -> None:
    # int64 ends at 2**63 - 1, and every square is below 2**40.
    assert mark(text) >= 0 and with_square(mark(text))[1] * 2**22 < 2**63


def test_an_order_is_told_from_another() -> None:
    assert mark("loss\nrate") == mark("loss\nrate") != mark("rate\nloss")


class Two(Backend):
    """One of two processes, of which the other says what it is told to."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.world_size, self.other = 2, other

    def total_on_host(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.int64
        return tensor + torch.tensor(with_square(self.other))


def test_a_backend_asks_all() -> None:
    assert Backend().same(3)
    assert Two(3).same(3) and not Two(4).same(3) and not Two(-3).same(3)


def asked() -> list[bool]:

    backend = Ddp()
    backend.setup()
    return [backend.same(7), backend.same(int(os.environ["RANK"]))]


def test_true_processes() -> None:
    assert ranks.results(asked) == [[True, False]] * 2
