"""Gathered: what the model made of a batch that several processes share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gathered(NamedTuple):
    """What the model made of a whole batch, on all processes.

    Attributes:
        first, second: of the two views; each in the form that the model gives, rows [N, ...] in
            the order of the batch. Gradients reach the processes that they came from.
        start: the number of this process's first row.
    """

    first: Any
    second: Any
    start: int
