"""Parity of two replicas: the same losses, metrics and weights as anywhere else, and checkpoints
that go on anywhere else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.training import Rows, Way

ROWS = Rows([Way("single", 1), Way("ddp", 2), Way("xla", 2)])


def test_they_give_the_same() -> None:
    ROWS.check_same(ROWS.ways[-1])


@pytest.mark.parametrize("way", ROWS.ways, ids=str)
def test_each_goes_on_from_anothers_checkpoint(way: Way, tmp_path: Path) -> None:
    ROWS.check_goes_on(way, tmp_path)
