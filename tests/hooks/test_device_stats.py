"""Hook ``device_stats``: what is read when, and what is left out where it cannot be read."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import Hook, Run
from phaseloop.engine.device_kinds import Cuda
from phaseloop.hooks import device_stats
from phaseloop.hooks.device_stats import DeviceStats
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs import equal, pairs, r1
from tests.rigs.r0 import r0, train

MIB = 2**20
OF_PROCESS = {"process_memory_mb", "process_memory_peak_mb", "process_threads", "process_cpu"}


def logged(folder: Path) -> dict[int, dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["update"]: {k.removeprefix("device/"): v for k, v in row.items() if "device/" in k}
        for row in found
        if "loss" in row
    }


def run(folder: Path, log_every: int = 1, **hooks: Hook) -> dict[int, dict[str, float]]:
    """What was logged in a run of four updates."""
    task = r0(range(4), 1, run=Run(str(folder), log_every=log_every))
    train(task, stats=DeviceStats(), rows=MetricsFile(), **hooks)
    return logged(folder)


class At(Hook):
    """Calls a function in the third update, before the measuring."""

    only_watches = True

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_update(self, task: Any) -> None:
        if task.progress.updates == 2:
            self.function()


def test_memory_and_threads_of_the_process(tmp_path: Path) -> None:
    """64 MiB are taken and written to, and three threads begin, in the third update."""
    kept: list[Any] = []
    over = threading.Event()

    def take() -> None:
        kept.append(torch.ones(64 * MIB // 4))
        kept.extend(threading.Thread(target=over.wait) for _ in range(3))
        for thread in kept[1:]:
            thread.start()

    try:
        found = run(tmp_path, at=At(take))
    finally:
        over.set()
    assert all(set(row) == OF_PROCESS for row in found.values())
    assert 60 < found[3]["process_memory_mb"] - found[2]["process_memory_mb"] < 80
    assert found[3]["process_threads"] - found[2]["process_threads"] == 3
    for row in found.values():
        assert row["process_memory_peak_mb"] >= row["process_memory_mb"] - 1


class Clock:
    """Stands for ``time``: of each second that passes the process computes half."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 2.0
        return self.now

    def process_time(self) -> float:
        return self.now / 2


def test_the_share_of_a_core_since_the_last_log_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_stats, "time", Clock())
    found = run(tmp_path, log_every=2)
    assert {update: row["process_cpu"] for update, row in found.items()} == {2: 50.0, 4: 50.0}


def test_data_workers_together(tmp_path: Path) -> None:
    r1.train(tmp_path, epochs=1, workers=2, hooks={"stats": DeviceStats()})
    rows = logged(tmp_path)
    alive = [row for row in rows.values() if "workers_memory_mb" in row]
    assert alive  # towards the end they have read all, and are gone
    for row in alive:
        assert row["workers_memory_mb"] > row["process_memory_mb"] / 10
        assert row["workers_cpu"] >= 0


def test_what_is_done_by_workers_is_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers; one is new at the second point and has computed for a second since."""
    given = [{7: (MIB, 5.0)}, {7: (MIB, 6.0), 8: (3 * MIB, 1.0)}]
    monkeypatch.setattr(device_stats, "_workers", lambda: given.pop(0).items())
    monkeypatch.setattr(device_stats, "time", Clock())
    hook = DeviceStats()
    hook._since = 100.0
    hook._process()
    found = hook._process()
    assert found["workers_memory_mb"] == 4
    assert found["workers_cpu"] == 100 * (1.0 + 1.0) / 2.0


# --- a GPU, of which there is none here: stand-ins for torch.cuda ---


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch.cuda says of it; an exception is raised."""
    says: dict[str, Any] = {
        "memory_allocated": 3 * MIB,
        "memory_reserved": 8 * MIB,
        "max_memory_allocated": 5 * MIB,
        "utilization": 87,
        "temperature": 61,
        "power_draw": 245_500,
    }

    def saying(name: str) -> Any:
        def call(device: Any) -> Any:
            if isinstance(says[name], Exception):
                raise says[name]
            return says[name]

        return call

    for name in says:
        monkeypatch.setattr(torch.cuda, name, saying(name))
    monkeypatch.setattr(device_stats, "kind_of", lambda device: Cuda())
    return says


MEMORY = {"memory_allocated_mb": 3.0, "memory_reserved_mb": 8.0, "memory_peak_mb": 5.0}


def test_a_gpu(tmp_path: Path, gpu: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    found = run(tmp_path)
    driver = {"utilization": 87.0, "temperature": 61.0, "power_w": 245.5}
    for row in found.values():
        assert {k: v for k, v in row.items() if k not in OF_PROCESS} == {**MEMORY, **driver}
    assert "left out" not in caplog.text


def test_without_the_drivers_package_memory_is_left(
    tmp_path: Path, gpu: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("utilization", "temperature", "power_draw"):
        gpu[name] = ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
    with caplog.at_level(logging.INFO, "phaseloop"):
        found = run(tmp_path)
    for row in found.values():
        assert {k: v for k, v in row.items() if k not in OF_PROCESS} == MEMORY
    said = "hooks.stats: utilization, temperature, power_w left out: nvidia-ml-py does not seem"
    assert caplog.text.count(said) == 1


def test_what_fails_later_is_left_out_from_then_on(
    tmp_path: Path, gpu: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fall() -> None:
        gpu["temperature"] = RuntimeError("fallen off the bus")

    found = run(tmp_path, at=At(fall))
    assert ["temperature" in row for row in found.values()] == [True, True, False, False]
    assert caplog.text.count("hooks.stats: temperature left out: fallen off the bus") == 1


# --- what it is no part of ---


def test_checkpoints_and_the_training_know_nothing_of_it(tmp_path: Path) -> None:
    plain = r1.train(tmp_path / "plain", epochs=1)
    stats = r1.train(tmp_path / "stats", epochs=1, hooks={"stats": DeviceStats()})
    assert plain["final"] == stats["final"]
    states = [equal.state_of(equal.newest(tmp_path / name)) for name in ("plain", "stats")]
    assert not list(equal.differ("recorder", *(state["recorder"] for state in states)))
    assert len(logged(tmp_path / "stats")) == 10
    assert "stats" not in states[1]["hooks"]


def of_ranks(folder: Path) -> Any:
    task = r1.make_task(folder, epochs=1, backend=pairs.ddp())
    pairs.train(task, **r1.make_hooks(stats=DeviceStats()))
    return logged(folder) if task.primary else None


def test_of_several_processes_those_of_the_primary(tmp_path: Path) -> None:
    ((found, _),) = pairs.results([(of_ranks, {"folder": tmp_path})])
    assert all(set(row) >= OF_PROCESS for row in found.values()) and len(found) == 10
