"""Hook ``device_stats``: memory and load of this process, its workers and its device."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phaseloop.engine.device_kinds import MIB, kind_of
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_PROC = Path("/proc")


@register_hook("device_stats")
class DeviceStats(Hook):
    """Logs, at log points, as they are at that moment:

    * of this process ``device/process_memory_mb`` (resident) and ``device/process_threads``, both
      from ``/proc``, so on Linux only; its peak, ``device/process_memory_peak_mb``; and
      ``device/process_cpu``, percent of one core since the last log point;
    * of its data workers, where it has any, ``device/workers_memory_mb`` and
      ``device/workers_cpu`` of all together. What they share with this process counts in each;
    * of a GPU ``device/memory_allocated_mb``, ``device/memory_reserved_mb`` and
      ``device/memory_peak_mb``, of this process; ``device/utilization`` (percent),
      ``device/temperature`` (°C) and ``device/power_w``, of the GPU, if the package
      ``nvidia-ml-py`` is there. What cannot be read is named once, and left out.

    A ``mb`` is 2^20 bytes. Of several processes these are the primary's. They are about this
    machine, and in no checkpoint.
    """

    only_watches = True

    def __init__(self) -> None:
        self._readings: dict[str, Callable[[], float]] = {}
        self._since = 0.0
        self._spent = 0.0
        self._by_workers: dict[int, float] = {}

    def on_start(self, task: Task) -> None:
        if not task.primary:
            return
        self._readings = kind_of(task.device).readings(task.device)
        self._read()  # what cannot be read is said now
        self._since, self._spent, self._by_workers = time.monotonic(), time.process_time(), {}

    def on_step(self, task: Task) -> None:
        if not (task.recorder.due and task.train and task.primary):
            return
        for name, value in {**self._process(), **self._read()}.items():
            task.recorder.note(f"device/{name}", round(value, 2))

    def _process(self) -> dict[str, float]:
        now, spent, workers = time.monotonic(), time.process_time(), dict(_workers())
        passed = max(now - self._since, 1e-9)
        found = {"process_memory_peak_mb": _peak() / MIB}
        if _PROC.joinpath("self", "statm").exists():
            found["process_memory_mb"] = _resident(os.getpid()) / MIB
            found["process_threads"] = float(len(os.listdir(_PROC / "self" / "task")))
        found["process_cpu"] = 100 * (spent - self._spent) / passed
        if workers:
            found["workers_memory_mb"] = sum(memory for memory, _ in workers.values()) / MIB
            # One that has come since then began at 0.
            busy = (cpu - self._by_workers.get(pid, 0.0) for pid, (_, cpu) in workers.items())
            found["workers_cpu"] = 100 * sum(busy) / passed
        self._since, self._spent = now, spent
        self._by_workers = {pid: cpu for pid, (_, cpu) in workers.items()}
        return found

    def _read(self) -> dict[str, float]:
        found, failed = {}, {}
        for name, reading in self._readings.items():
            try:
                found[name] = reading()
            except Exception as error:  # the driver's own kinds, which only its package knows
                failed[name] = error
        for name in failed:
            del self._readings[name]
        if failed:
            why = next(iter(failed.values()))
            log.warning("hooks.%s: %s left out: %s", self.name, ", ".join(failed), why)
        return found


def _workers() -> Iterator[tuple[int, tuple[int, float]]]:
    """Of each child process its number, its resident bytes, and the seconds that it has computed;
    none where there is no ``/proc``, or where it has just ended."""
    for child in multiprocessing.active_children():
        if child.pid is None:
            continue
        try:
            fields = _PROC.joinpath(str(child.pid), "stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])  # user and system
            yield child.pid, (_resident(child.pid), ticks / os.sysconf("SC_CLK_TCK"))
        except (FileNotFoundError, ProcessLookupError):
            continue


def _resident(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(_PROC.joinpath(str(pid), "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    """The most that this process has had, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
