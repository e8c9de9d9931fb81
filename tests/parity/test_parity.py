"""Parity: every way to run gives the same losses, metrics and weights, and goes on from any other.

A backend joins by a line here; one that needs an environment of its own does in its own tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.training import Rows, Way

ROWS = Rows([Way("single", 1), Way("ddp", 2), Way("ddp", 3), Way("fsdp", 2)])


@pytest.mark.parametrize("way", ROWS.ways, ids=str)
def test_every_way_gives_the_same(way: Way) -> None:
    ROWS.check_same(way)


@pytest.mark.parametrize("way", ROWS.ways, ids=str)
def test_every_way_goes_on_from_another_ones_checkpoint(way: Way, tmp_path: Path) -> None:
    ROWS.check_goes_on(way, tmp_path)
