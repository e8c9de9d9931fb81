"""Parity: Horovod gives what the others give, goes on from their checkpoints, and they from its."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.training import Rows, Way

ROWS = Rows([Way("single", 1), Way("horovod", 2), Way("ddp", 2), Way("horovod", 3)])


@pytest.mark.parametrize("way", ROWS.ways, ids=str)
def test_every_way_gives_the_same(way: Way) -> None:
    ROWS.check_same(way)


@pytest.mark.parametrize("way", ROWS.ways, ids=str)
def test_every_way_goes_on_from_another_ones_checkpoint(way: Way, tmp_path: Path) -> None:
    ROWS.check_goes_on(way, tmp_path)
