"""A run's folder that is moved or removed while the run trains: said once, in a sentence."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Hook, Order, Task, Trainer
from phaseloop.engine.checkpoint.store import Store
from phaseloop.engine.errors import CheckpointError
from phaseloop.hooks.crash import Crash
from tests.rigs import r1


class Do(Hook):
    """Does something to the run's folder after so many updates; 0: while everything is built."""

    only_watches = True
    order = Order.BARRIER

    def __init__(self, updates: int, what: Callable[[Path], Any]) -> None:
        self.updates, self.what, self.done = updates, what, False

    def on_start(self, task: Task) -> None:
        self._do(task)

    def on_step(self, task: Task) -> None:
        self._do(task)

    def _do(self, task: Task) -> None:
        if task.progress.updates == self.updates and not self.done:
            assert task.folder is not None
            task.writer.settle()
            self.what(task.folder.path)
            self.done = True


def train(folder: Path, updates: int, what: Callable[[Path], Any]) -> None:
    hooks = r1.make_hooks(save={"every_updates": 3}, do=Do(updates, what))
    Trainer(r1.make_task(folder, epochs=1), {**hooks, "crash": Crash()}).train()


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


@pytest.mark.parametrize("updates", [0, 2])
@pytest.mark.parametrize(
    ("what", "said"),
    [(move, "was moved while .*run.dir=NEW_PATH"), (shutil.rmtree, "was removed while .*anew")],
)
def test_a_lost_folder_is_told_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    updates: int,
    what: Callable[[Path], Any],
    said: str,
) -> None:
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path / "run", updates, what)
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and "while it trained" in errors[0]
    assert "while it trained" not in capsys.readouterr().out  # whoever called says it
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_are_removed_meanwhile_are_made_anew_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", 4, lambda path: shutil.rmtree(path / "checkpoints"))
    warned = [record.message for record in caplog.records if "it is made anew" in record.message]
    assert len(warned) == 1 and str(tmp_path / "run" / "checkpoints") in warned[0]
    checkpoints = Store(tmp_path / "run" / "checkpoints")
    assert [saved.position[0] for saved in checkpoints.whole()] == [10]
    assert ".lock" in os.listdir(tmp_path / "run" / "checkpoints")
