"""Parity: every way to run gives the same losses, metrics and weights, and goes on from any other.

A backend joins by a line in :data:`WAYS`.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest

from tests.parity import training
from tests.parity.training import MIDDLE, Job, Way
from tests.rigs import process

WAYS = [Way("single", 1), Way("ddp", 2), Way("ddp", 3), Way("fsdp", 2)]
PIECES = (1, 3)
"""Micro-batches of a window."""
MOST = 1e-10
"""Largest difference, in float64: only the order of sums is another."""

ROWS = [(way, pieces) for way in WAYS for pieces in PIECES]


@functools.cache
def undisturbed(way: Way) -> dict[int, Path]:
    """By the number of micro-batches, the folders of undisturbed runs in the same processes."""
    place = Path(tempfile.mkdtemp(dir=process.scratch()))
    folders = {pieces: place / str(pieces) for pieces in PIECES}
    training.run(way, [Job(str(folder), pieces) for pieces, folder in folders.items()])
    return folders


def reference() -> Path:
    return undisturbed(WAYS[0])[PIECES[0]]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_gives_the_same(way: Way) -> None:
    for pieces, folder in undisturbed(way).items():
        found = list(training.differences(reference(), folder, 0, MOST))
        assert not found, f"{way}, {pieces} micro-batches: {found}"


def sources(number: int) -> list[tuple[Way, int]]:
    """Whose checkpoints a row goes on from: the row's before it, in a circle, and one by chance.

    So each row's checkpoint is taken up, and a run handed from row to row would come around.
    """
    others = [row for row in ROWS if row != ROWS[number]]
    return [ROWS[number - 1], random.Random(number).choice(others)]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_goes_on_from_another_ones_checkpoint(way: Way, tmp_path: Path) -> None:
    jobs, names = [], []
    for number, (other, pieces) in enumerate(ROWS):
        if other != way:
            continue
        for source, cut in sources(number):
            start = training.middle(undisturbed(source)[cut])
            jobs.append(Job(str(tmp_path / str(len(jobs))), pieces, str(start)))
            names.append(f"{pieces} micro-batches, from {source} with {cut}")
    training.run(way, jobs)
    for job, name in zip(jobs, names, strict=True):
        found = list(training.differences(reference(), Path(job.folder), MIDDLE, MOST))
        assert not found, f"{way}, {name}: {found}"
