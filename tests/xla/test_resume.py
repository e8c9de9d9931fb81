"""RES on XLA: a run that was killed and goes on equals the undisturbed one, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phaseloop.engine.backends import Xla
from tests.rigs import equal, process, r1

LIMIT = 200.0
OPTIONS = {"epochs": 2, "augment": True, "test": True, "schedule": r1.Plan("warmup_cosine")}
SAVE = {"every_epochs": 1, "every_updates": 3}

KILLS = {
    "between two steps": ("on_step", 5, "train"),
    "in a step": ("on_backward", 13, "train"),
    "in a test": ("on_loss_and_meter", 10, "test"),
}
"""Event, updates made, and phase."""


def train(folder: Path, kill: tuple[str, int, str] | None = None) -> Mapping[str, Any]:
    """R1 on XLA, dropout and all, in this process."""
    hooks = {}
    if kill is not None:
        event, updates, phase = kill
        hooks["at"] = r1.At(event, updates, phase=phase)
    probe = equal.probe_of(folder)
    return r1.train(folder, probe, save=SAVE, hooks=hooks, backend=Xla(), **OPTIONS)


def train_all(folders: list[Path]) -> None:
    """One after another: what is compiled for one is there for the next."""
    for folder in folders:
        train(folder)


def test_killed_and_resumed_it_equals_the_undisturbed_run(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in KILLS}
    for name, kill in KILLS.items():
        assert process.start(train, runs[name], kill).wait(LIMIT).code == -signal.SIGKILL
    process.result_within(LIMIT, train_all, [*runs.values(), tmp_path / "undisturbed"])
    for name, folder in runs.items():
        found = list(equal.differences(tmp_path / "undisturbed", folder))
        assert not found, f"killed {name}: {found}"
