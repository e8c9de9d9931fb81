"""Features on disk: a set that takes the place of another, killed anywhere on the way."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop.engine import features
from tests.rigs import process

ROWS = 4


def extract(folder: Path, value: float) -> None:
    """A set of two parts, all of whose features are ``value``."""
    writer = features.PartWriter(features.begin(folder), 0, ROWS // 2)
    for rows in torch.arange(ROWS).split(ROWS // 2):
        writer.add({"features": torch.full((len(rows), 2), value), "indices": rows})
    writer.flush()
    features.finish(folder, writer.written, writer.tensors, {})


def found_in(folder: Path) -> float:
    """The value of a set, which has to be whole."""
    found = features.load_features(folder)
    assert found.indices.tolist() == list(range(ROWS))
    (value,) = found.features.unique().tolist()
    return float(value)


def killed_at(folder: str, place: str) -> None:
    """Extract 2s, and be killed at this place."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(real: Callable[..., Any], number: int) -> Callable[..., Any]:
        calls = iter(range(1, 100))
        return lambda *args, **options: kill() if next(calls) == number else real(*args, **options)

    def half_removed(old: Path, **options: Any) -> None:
        (old / features.MANIFEST).unlink()
        kill()

    if place.startswith("rename"):
        os.rename = before(os.rename, int(place[-1]))
    elif place == "removal":
        shutil.rmtree = before(shutil.rmtree, 1)
    else:
        shutil.rmtree = half_removed  # type: ignore[assignment]
    extract(Path(folder), 2.0)


@pytest.mark.parametrize(
    ("place", "left"),
    [("rename 1", 1.0), ("rename 2", 1.0), ("removal", 2.0), ("half a removal", 2.0)],
)
def test_killed_while_it_takes_the_place_of_another(tmp_path, place, left):
    folder = tmp_path / "test"
    extract(folder, 1.0)
    assert process.run(killed_at, str(folder), place).code == -signal.SIGKILL
    assert found_in(folder) == left
    extract(folder, 3.0)
    assert found_in(folder) == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["test"]


@pytest.mark.parametrize("place", ["rename 2", "half a removal"])
def test_killed_twice_in_a_row(tmp_path, place):
    folder = tmp_path / "test"
    extract(folder, 1.0)
    for _ in range(2):
        process.run(killed_at, str(folder), place)
        assert found_in(folder) in (1.0, 2.0)
    extract(folder, 3.0)
    assert found_in(folder) == 3.0


def test_what_is_left_of_an_old_set_is_none(tmp_path):
    """It was killed while it removed the old set, and the new one has been taken away since."""
    folder = tmp_path / "test"
    extract(folder, 1.0)
    process.run(killed_at, str(folder), "half a removal")
    shutil.rmtree(folder)
    with pytest.raises(features.DataError, match="holds no features"):
        features.load_features(folder)
    extract(folder, 3.0)
    assert found_in(folder) == 3.0
