"""The process around a run: threads, deterministic operations, and what both were."""

from __future__ import annotations

import os
import platform
import threading
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from phaseloop.engine.settings import Run

# A module with a settable property, which its type stubs do not know.
_fill: Any = torch.utils.deterministic

_one_at_a_time = threading.Lock()
_on: list[Environment] = []
"""Of the runs that are on, as they began: of threads that are ranks each has one."""


class Environment:
    """Settings of the whole process, applied for a run and put back after it.

    Args:
        run: what the user asked for.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[str, Any] = {}
        self._grad = True

    def apply(self) -> None:
        """Set threads and determinism as ``run`` says."""
        self._grad = torch.is_grad_enabled()  # each thread has its own
        with _one_at_a_time:
            self._apply()

    def _apply(self) -> None:
        _on.append(self)
        self._before = {
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "fill": _fill.fill_uninitialized_memory,
            "benchmark": torch.backends.cudnn.benchmark,
        }
        if self._run.threads is not None:
            torch.set_num_threads(self._run.threads)
        if self._run.deterministic:
            # Read by cuBLAS when it starts; without it torch refuses matrix products on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # Filling fresh memory guards against reading it unset, at the price of a pass over
            # every new tensor; no operation of torch reads memory unset.
            _fill.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False

    def put_back(self) -> None:
        """Undo :meth:`apply`."""
        if self not in _on:
            return
        torch.set_grad_enabled(self._grad)
        with _one_at_a_time:
            place = _on.index(self)
            _on.remove(self)
            if place == len(_on):
                self._put_back()
            else:  # another has begun meanwhile, which found what this one had set
                _on[place]._before = self._before

    def _put_back(self) -> None:
        torch.set_num_threads(self._before["threads"])
        torch.use_deterministic_algorithms(
            self._before["deterministic"], warn_only=self._before["warn_only"]
        )
        _fill.fill_uninitialized_memory = self._before["fill"]
        torch.backends.cudnn.benchmark = self._before["benchmark"]


def facts(world_size: int, device_name: str) -> dict[str, Any]:
    """What the last bits of a result may depend on, as plain Python, for a checkpoint.

    Args:
        device_name: what it is computed on; see ``Backend.device_name``.
    """
    return {
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device_name,
        "processes": world_size,
    }


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, in words: ``threads 2 -> 1``; empty when nothing does.

    Not the number of processes, which is said by itself where it matters.
    """
    return ", ".join(
        f"{key} {saved.get(key)} -> {now.get(key)}"
        for key in sorted({*saved, *now} - {"processes"})
        if saved.get(key) != now.get(key)
    )
