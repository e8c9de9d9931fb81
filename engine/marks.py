"""Marks: whether all processes have the same, found by one sum of numbers and of their squares."""

from __future__ import annotations

import zlib

_MARKS = 2**20  # a square of one, times as many processes as there will be, is an int64


def mark(text: str) -> int:
    """A number for a text: another one, nearly always, for another text."""
    return zlib.crc32(text.encode()) % _MARKS


def with_square(number: int) -> list[int]:
    """What every process adds to the sum."""
    return [number, number * number]


def are_same(total: int, squares: int, count: int) -> bool:
    """Whether so many numbers, of this sum and this sum of squares, are equal.

    Equal numbers, and no others, have a square of the sum that is so many times the squares' sum:
    by Cauchy and Schwarz it is less for all others.
    """
    return total**2 == squares * count
