"""Where the time goes from a command line's start to the first update of digits.

Each row of the first table is a program in fresh interpreters, in turn: ``import torch``, and what
a training of one's own imports of phaseloop. The second follows ``config=digits`` through one
process: whatever is imported counts for who asked for it, and all else for the part of the start
that runs. Times are those of the processor, so that others on the machine count little; those of
the clock stand beside them.

The exit code is 1 where a bar is not held.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "python": "pass",
    "torch": "import torch",
    "phaseloop": "from phaseloop import Hook, Task, Trainer",
}
BARS = {
    "import": 1.3,  # times what torch's takes
    "first update": 2.0,  # seconds of the processor after the imports of torch and phaseloop
}
FIRST = "_FIRST_UPDATE"

# Whose import it is: the outermost of these that is under way, but for the engine's own modules,
# within which each of the others counts for itself.
OWNERS = ("torch._dynamo", "torch.utils.tensorboard", "torch", "hydra", "omegaconf", "tensorboard",
          "matplotlib", "fvcore", "torchdata", "torchmetrics", "rich", "yaml", "numpy")  # fmt: skip
BEFORE = ("torch", "phaseloop")
"""Imports that are no part of what comes after them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print both tables, and exit with 1 where a bar is not held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="fresh interpreters of each kind")
    rounds = parser.parse_args(arguments).rounds
    held = [imports(rounds), first_update(rounds)]
    sys.exit(0 if all(held) else 1)


# --- importing ---


def imports(rounds: int) -> bool:
    """The first table; whether its bar is held."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        for name, code in PROGRAMS.items():
            times = _seconds([sys.executable, "-c", code])
            if number:  # the first ones fill the disk's cache
                found[name].append(times)
    print(f"{'imports':24}{'processor':>12}{'clock':>12}")
    for name, times in found.items():
        print(f"{name:24}" + "".join(f"{1000 * t:9.0f} ms" for t in _medians(times)))
    ratio = _medians(found["phaseloop"])[0] / _medians(found["torch"])[0]
    return _bar("phaseloop / torch", ratio, BARS["import"], "times")


def _seconds(command: list[str]) -> tuple[float, float]:
    """Of the processor, and of the clock, until it has ended."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, env=_environment())
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, clock


# --- the first update ---


def first_update(rounds: int) -> bool:
    """The second table; whether its bar is held."""
    found = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, FIRST, f"run.dir={folder}/run"]
            said = subprocess.run(command, check=True, cwd=ROOT, env=_environment(),
                                  stdout=subprocess.PIPE, text=True).stdout  # fmt: skip
        if number:
            found.append(json.loads(said.splitlines()[-1]))
    print(f"\n{'to the first update':24}{'processor':>12}{'clock':>12}")
    for name in found[0]:
        times = _medians([one[name] for one in found])
        if max(times) >= 0.005:
            print(f"{name:24}" + "".join(f"{1000 * t:9.0f} ms" for t in times))
    rest = [sum(t[0] for name, t in one.items() if name not in _BEFORE) for one in found]
    return _bar("after torch, phaseloop", statistics.median(rest), BARS["first update"], "s")


def _medians(times: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*times, strict=True)]


def _bar(name: str, value: float, bar: float, unit: str) -> bool:
    print(f"{name:24}{value:12.2f} {unit}, at most {bar:g}{'' if value <= bar else ': NOT HELD'}")
    return value <= bar


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


_BEFORE = [f"import {name}" for name in BEFORE]


class Clock:
    """Shares the time of this process out among what runs, the innermost of it."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self._names = ["python"]
        # From the process's birth on.
        self._last = [0.0, time.perf_counter()]

    def run(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function, whose time counts for this name."""
        self._share()
        self._names.append(name)
        try:
            return function(*args, **options)
        finally:
            self._share()
            self._names.pop()

    def stop(self) -> dict[str, list[float]]:
        """By name, seconds of the processor and of the clock."""
        self._share()
        return self.found

    def importing(self, module: str) -> str:
        """Who has asked for this module."""
        for name in reversed(self._names):
            if name.startswith("import ") and name != "import phaseloop":
                return name
        owner = next((o for o in OWNERS if module == o or module.startswith(f"{o}.")), "phaseloop")
        return f"import {owner}"

    def _share(self) -> None:
        now = [time.process_time(), time.perf_counter()]
        times = self.found.setdefault(self._names[-1], [0.0, 0.0])
        for index in (0, 1):
            times[index] += now[index] - self._last[index]
        self._last = now


def follow(words: Sequence[str]) -> None:
    """In a process of its own: ``config=digits`` to its first update; prints what took how long."""
    from importlib.machinery import ExtensionFileLoader, SourceFileLoader

    clock = Clock()

    def watch(loader: type) -> None:
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(self: Any, module: ModuleType) -> None:
            name = module.__name__
            clock.run(clock.importing(name), execute, self, module)
            for place, method, span in _SPANS.get(name, []):
                _span(clock, getattr(module, place) if place else module, method, span)

        loader.exec_module = exec_module  # type: ignore[attr-defined]

    watch(SourceFileLoader)
    watch(ExtensionFileLoader)
    from phaseloop.tools import run

    run.main(["config=digits", *words])
    raise AssertionError("no update was made")


# Module, what has the function in it, the function, and the part of the start that it is.
_SPANS: dict[str, list[tuple[str, str, str]]] = {
    "phaseloop.engine.config.compose": [("", "compose", "composing the configuration")],
    "phaseloop.engine.config.schema": [("", "check", "checking it")],
    "phaseloop.engine.config.build": [("", "build", "building the task")],
    "phaseloop.engine.trainer": [("Trainer", "_start", "starting the run")],
    "phaseloop.engine.events": [("Dispatcher", "__init__", "hooks")],
    "phaseloop.engine.task": [
        ("Task", "next_batch", "the first batch"),
        ("Task", "commit", FIRST),
    ],
}


def _span(clock: Clock, place: Any, method: str, span: str) -> None:
    function = getattr(place, method)

    def measured(*args: Any, **options: Any) -> Any:
        result = clock.run(span, function, *args, **options)
        if method == "__init__":  # which gives each dispatcher its own
            _span(clock, args[0], "on_start", "hooks' on_start")
        if span == FIRST:
            times = clock.stop()
            sys.stdout.flush()
            os.write(1, f"\n{json.dumps(times)}\n".encode())
            os._exit(0)
        return result

    setattr(place, method, measured)


if __name__ == "__main__":
    if FIRST in sys.argv[1:2]:
        follow(sys.argv[2:])
    else:
        main()
