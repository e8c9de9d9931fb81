"""A run's folder that is moved or removed while the run trains: what is said, and made anew."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from phaseloop.engine.errors import CheckpointError

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def check_place(task: Task) -> None:
    """Raises CheckpointError where the run's folder is gone: another run may be where it was.

    A folder of checkpoints that is gone is made anew, with its lock, and a word.
    """
    check_folder(task)
    assert task.folder is not None
    if task.primary and task.folder.renew_checkpoints():
        log.warning(
            "%s was moved or removed while the run trained: it is made anew, and the checkpoints "
            "that were in it are not in it any more",
            task.folder.checkpoints,
        )


def check_folder(task: Task) -> None:
    """Raises CheckpointError where the run's folder is gone."""
    if (error := lost_place(task)) is not None:
        raise error


def lost_place(task: Task) -> CheckpointError | None:
    """The run's folder is gone."""
    folder = task.folder
    lost = "" if folder is None or not task.primary else folder.lost
    if folder is None or not lost:
        return None
    if lost == "moved":
        return CheckpointError(
            f"the run's folder was moved while it trained, so nothing more is written to "
            f"{folder.path}. What is in it stands: go on by the same command with run.dir=NEW_PATH"
        )
    return CheckpointError(
        f"the run's folder, or its lock, was removed while it trained, so nothing more is written "
        f"to {folder.path}. The same command goes on from what is left there, or begins anew; "
        f"where the folder was moved to another disk, give that as run.dir"
    )
