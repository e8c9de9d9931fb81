"""RES on several processes: killed, resumed, equal to the bit; each rank has its random states."""

from __future__ import annotations

import functools
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.rigs import equal, process, r1, ranks
from tests.rigs.equal import probe_of
from tests.rigs.r1 import At

OPTIONS: dict[str, Any] = {
    "augment": True,
    "test": True,
    "optimizer_name": "adam",
    "data": {"micro_batch_size": 1},
    "save": {"every_updates": 5, "keep_best": 1, "metric": "test/loss"},
}
"""Micro-batches of one: with a batch of 4, each rank has a window of two."""


def go(folder: Path, at: At | None = None, processes: int = 2, **options: Any) -> list[Any]:
    """The processes of the run in ``folder``, broken off by ``at``, or to its end."""
    hooks = {} if at is None else {"at": at}
    return ranks.run(
        r1.train, folder, probe_of(folder), hooks=hooks, processes=processes, **options
    )


@functools.cache
def reference() -> Path:
    """An undisturbed run of two processes."""
    folder = Path(tempfile.mkdtemp(dir=process.scratch())) / "reference"
    finish(folder)
    return folder


def finish(folder: Path, **options: Any) -> None:
    ended = go(folder, **{**OPTIONS, **options})
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank}: {one.output}"
        assert one.value["status"] == "finished"


BREAKS = {
    "all killed in an epoch": At("on_step", 17),
    "all killed in a test": At("on_forward", 10, phase="test"),
    "all killed at an epoch's end": At("on_phase_end", 20, order=99),
    "one killed between two updates": At("on_step", 17, rank=1),
    "one killed in a window": At("on_backward", 16, rank=1),
    "one raises": At("on_gradients", 13, "raise", rank=1),
    "one is told to end": At("on_step", 13, signal.SIGTERM, rank=1),
    "one is told to end in a test": At("on_step", 10, signal.SIGTERM, phase="test", rank=1),
    "one asks for a stop": At("on_step", 13, "stop", rank=0),
}


@pytest.mark.parametrize("name", BREAKS)
def test_res_a_resumed_is_equal_to_the_bit(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    ended = go(folder, BREAKS[name], **OPTIONS)
    if "told" in name or "asks" in name:  # at one border, with the state saved
        assert [one.code for one in ended] == [0, 0], [one.output for one in ended]
        first, second = (one.value for one in ended)
        assert first["status"] == second["status"] == "stopped"
        assert first["updates"] == second["updates"] == equal.newest(folder).position[0]
        assert first["signal"] == second["signal"] == (signal.SIGTERM if "told" in name else None)
    else:
        assert all(one.code for one in ended), [one.output for one in ended]
    finish(folder)
    equal.assert_eq(reference(), folder)


def test_res_a_of_three_processes_where_the_order_of_a_sum_shows(tmp_path: Path) -> None:
    layers = [nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)]
    options = {
        "model": nn.Sequential(*layers), "optimizer_name": "sgd", "processes": 3,
        "epochs": 2, "save": {"every_updates": 3},
    }  # fmt: skip
    finish(tmp_path / "reference", **options)
    ended = go(tmp_path / "run", At("on_step", 4), **{**OPTIONS, **options})
    assert all(one.code for one in ended), [one.output for one in ended]
    finish(tmp_path / "run", **options)
    equal.assert_eq(tmp_path / "reference", tmp_path / "run")
