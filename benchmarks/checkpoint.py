"""What a save costs: against torch.save, while the training goes on and while it stands.

The state is a model's and its SGD momentum: by default 50 million parameters, so 400 MB. Each round
measures everything once, one after the other, so that a slow minute of the machine is everyone's:

* ``torch.save``: plain, into one file, not flushed to disk;
* ``torch.save, safe``: with the same flushing to disk and the same checksums;
* ``in the background``: the stall (copying the state, the first save left out) and the time until
  the checkpoint is on disk, while a loop makes steps of a few milliseconds;
* ``in the background, still``: the same while the loop only waits;
* ``in the main thread``: with ``hooks.checkpoint.background: false``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phaseloop.engine.checkpoint.store import Store, folder_name
from phaseloop.engine.checkpoint.writer import Save, Writer

STALL, TOTAL = 0.25, 1.5
"""The bars: stall over plain torch.save, and all over torch.save with flushing and checksums."""

WIDTH = 1000


def make_state(parameters: int) -> dict[str, Any]:
    """A model's and its optimizer's state after one step; float32."""
    layers = max(1, parameters // (WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    momenta = {
        name: {"momentum_buffer": optimizer.state[parameter]["momentum_buffer"]}
        for name, parameter in model.named_parameters()
    }
    return {"model.pt": model.state_dict(), "state.pt": {"optimizer": momenta, "updates": 1}}


class _Hashing:
    """A file whose content is hashed while it is written."""

    def __init__(self, file: Any) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.file.write(data)
        self.hash.update(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def plain(state: dict[str, Any], folder: Path) -> None:
    for name, part in state.items():
        torch.save(part, folder / name)


def safe(state: dict[str, Any], folder: Path) -> None:
    for name, part in state.items():
        with open(folder / name, "wb") as file:
            torch.save(part, _Hashing(file))  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())


def step(x: torch.Tensor) -> None:
    """A few milliseconds of training: work in torch, and a little Python."""
    for _ in range(8):
        x = torch.tanh(x @ x)


class Measured:
    """The ways to save, each with its times."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.writer = Writer()
        self.saves = 0
        self.times: dict[str, list[float]] = defaultdict(list)

    def timed(self, label: str, save: Callable[[dict[str, Any], Path], None]) -> None:
        place = self.folder / "plain"
        place.mkdir()
        begun = time.perf_counter()
        save(self.state, place)
        self.times[label].append(time.perf_counter() - begun)
        shutil.rmtree(place)

    def ours(self, label: str, training: bool = False, background: bool = True) -> None:
        self.saves += 1
        save = Save(Store(self.folder / "checkpoints"), folder_name(self.saves, 1), {})
        x = torch.randn(256, 256) / 16
        if background:
            self.writer.begin(save, self.state)
        else:
            self.writer.write(save, self.state)
        steps, begun = 0, time.perf_counter()
        while training and not self.writer.over:
            step(x)
            steps += 1
        spent = time.perf_counter() - begun
        self.writer.wait()
        save.check()
        self.times[f"{label}: stall"].append(save.stalled)
        self.times[f"{label}: on disk"].append(save.seconds)
        if steps:
            self.times[f"{label}: a step meanwhile"].append(spent / steps)
        save.store.remove(save.name)

    def alone(self) -> None:
        x = torch.randn(256, 256) / 16
        begun = time.perf_counter()
        for _ in range(50):
            step(x)
        self.times["a step alone"].append((time.perf_counter() - begun) / 50)


def measure(parameters: int, rounds: int, folder: Path) -> dict[str, float]:
    """Medians in seconds, by label."""
    measured = Measured(make_state(parameters), folder)
    measured.ours("first", training=False)  # makes the buffers, and is not counted
    ways: list[Callable[[], None]] = [
        lambda: measured.timed("torch.save", plain),
        lambda: measured.ours("in the background", training=True),
        lambda: measured.timed("torch.save, safe", safe),
        lambda: measured.ours("in the background, still"),
        lambda: measured.ours("in the main thread", background=False),
        measured.alone,
    ]
    for number in range(rounds):
        # What one leaves the disk to do, the next one pays for: each comes behind each.
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            os.sync()
            way()
    return {label: statistics.median(times) for label, times in measured.times.items()}


def main() -> int:
    """Measure and print; the exit code is 1 where a bar is not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder or Path.cwd(), prefix=".benchmark-"))
    try:
        medians = measure(options.parameters, options.rounds, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{options.parameters:,} parameters and their momentum, {options.rounds} rounds, medians")
    for label, seconds in medians.items():
        print(f"{label:<42} {seconds:8.4f} s")
    held = True
    for where in ("in the background", "in the background, still"):
        stall = medians[f"{where}: stall"] / medians["torch.save"]
        total = medians[f"{where}: on disk"] / medians["torch.save, safe"]
        held = held and stall <= STALL and total <= TOTAL
        print(f"{where}: stall / torch.save = {stall:.2f} (at most {STALL})")
        print(f"{where}: in all / torch.save, safe = {total:.2f} (at most {TOTAL})")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
