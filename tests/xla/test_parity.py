"""Parity on XLA: the same losses, metrics and weights as anywhere else, and checkpoints for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.training import Rows, Way

ROWS = Rows([Way("single", 1), Way("xla", 1)])


def test_it_gives_the_same() -> None:
    ROWS.check_same(ROWS.ways[-1])


@pytest.mark.parametrize("way", ROWS.ways, ids=str)
def test_each_goes_on_from_the_others_checkpoint(way: Way, tmp_path: Path) -> None:
    ROWS.check_goes_on(way, tmp_path)
