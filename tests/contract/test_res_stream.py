"""RES with streams: an interrupted run goes on in a new process with the very next sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_res import BREAKS, finish, go, ids_of_epoch, updates
from tests.rigs import r1, streams
from tests.rigs.equal import assert_eq, probe_of, undisturbed

READ = [(kind, workers) for kind in streams.KINDS for workers in (0, 2)]


def options_of(kind: str, workers: int, **more: Any) -> dict[str, Any]:
    return {"train": streams.data(kind, workers), **more}


@pytest.mark.parametrize("way", BREAKS)
@pytest.mark.parametrize(("kind", "workers"), READ)
def test_res_a_every_sample_of_the_interrupted_pass_once(
    tmp_path: Path, kind: str, workers: int, way: str
) -> None:
    """Stopped in epoch 2 after update 7 of 10; augmentation draws from all three generators."""
    make_at, code, more = BREAKS[way]
    options = options_of(kind, workers, **more)
    folder = tmp_path / "run"
    assert go(folder, make_at(17), **options).code == code
    finish(folder, **options)

    first, second = r1.lives(probe_of(folder))
    assert updates(first) == list(range(1, 18))
    assert updates(second) == list(range(18, 31))
    ids = ids_of_epoch(folder, 2)
    assert sorted(ids) == list(range(40))
    assert ids == ids_of_epoch(undisturbed(**options), 2)
    assert_eq(undisturbed(**options), folder)
