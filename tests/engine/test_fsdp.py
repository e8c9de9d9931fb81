"""Backend fsdp: the mathematics of one process on any number, and whole tensors on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rigs import process, ranks, sharded

TOLERANCE = 1e-10
"""Of what float64 sums in another order."""


def alone(folder: Path, **options: Any) -> dict[str, Any]:
    """What one process makes of it, in a new process."""
    result: dict[str, Any] = process.result(sharded.train, folder / "alone", **options)
    return result


def together(folder: Path, count: int = 2, **options: Any) -> list[dict[str, Any]]:
    """What several make of it, by rank."""
    return ranks.results(
        sharded.train, folder / "together", processes=count, backend="fsdp", **options
    )


def assert_close(folder: Path, one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    a, b = sharded.saved(folder / "alone"), sharded.saved(folder / "together")
    assert sharded.furthest(a, b) < TOLERANCE
    for each in several:
        assert sharded.furthest(one, each) < TOLERANCE


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_train_as_one_whatever_the_shapes(tmp_path: Path, count: int) -> None:
    options = {"test": 5}
    one = alone(tmp_path, **options)
    # Different weights at first: those of the primary are everyone's.
    several = together(tmp_path, count, seed=[0, 1, 2], **options)
    assert_close(tmp_path, one, several)
