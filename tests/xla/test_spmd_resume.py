"""SPMD: what is saved there goes on there bit for bit, and on one device or the CPU."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.engine.precision import Precision
from tests.rigs import process, r1, spmd
from tests.rigs.equal import assert_eq, newest, probe_of
from tests.rigs.r1 import At

SHORT: dict[str, Any] = {"epochs": 1, "save": {"every_updates": 3}}


def go(folder: Path, at: At | None = None, **options: Any) -> process.Ended:
    hooks = {} if at is None else {"at": at}
    return spmd.run(spmd.train, folder, probe_of(folder), hooks=hooks, **{**SHORT, **options})


def finished(folder: Path, **options: Any) -> str:
    """The last process of a run; what it printed."""
    ended = go(folder, **options)
    assert ended.code == 0, ended.output
    assert ended.value["status"] == "finished"
    return ended.output


@pytest.mark.parametrize("way", ["spmd", "shard"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, way: str) -> None:
    """R1 draws on the device too: in its dropout."""
    reference, folder = tmp_path / "reference", tmp_path / "run"
    finished(reference, test=True, way=way)
    assert go(folder, At("on_step", 5), test=True, way=way).code == -signal.SIGKILL
    finished(folder, test=True, way=way)
    first, second = r1.lives(probe_of(folder))
    assert [len(first), len(second)] == [5, 7]  # killed after update 5; saved was update 3
    assert_eq(reference, folder)


def plain(seed: int = 0) -> torch.nn.Module:
    """R1's network without what draws, which is another's on another device."""
    model = r1.network(seed)
    model[2] = torch.nn.Identity()
    return model


def of_numbers(folder: Path, at: At | None = None, **options: Any) -> process.Ended:
    return go(folder, at, model=plain(), precision=Precision("float64"), **options)


def weights(folder: Path) -> list[float]:
    found = torch.load(newest(folder).path / MODEL, weights_only=True)
    return [x for tensor in found.values() for x in tensor.double().flatten().tolist()]


def test_a_checkpoint_goes_on_elsewhere_and_comes_back(tmp_path: Path) -> None:
    """Updates 1 to 3 by SPMD, 4 to 6 on the CPU, and the rest by SPMD on another number."""
    reference, folder = tmp_path / "reference", tmp_path / "run"
    assert of_numbers(reference, way="single").code == 0
    killed = -signal.SIGKILL
    assert of_numbers(folder, At("on_step", 4)).code == killed
    on_cpu = of_numbers(folder, At("on_step", 8), way="single")
    assert on_cpu.code == killed
    assert (
        "last bits may differ from the run before: device 2 xla:CPU by SPMD -> cpu" in on_cpu.output
    )
    back = of_numbers(folder, devices=1)
    assert back.code == 0, back.output
    assert "device cpu -> 1 xla:CPU by SPMD" in back.output
    _, second, third = r1.lives(probe_of(folder))
    assert [line["update"] for line in second] == [4, 5, 6, 7, 8]
    assert [line["update"] for line in third] == [7, 8, 9, 10]
    assert spmd.close(weights(reference), weights(folder))
