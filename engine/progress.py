"""Progress: the few numbers that say how far a run has come."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from phaseloop.engine.errors import CheckpointError


@dataclass
class Progress:
    """Counts of a run. They move in ``Walk``: at a step's commit and at the borders of phases.

    Attributes:
        updates: updates that counted, over the whole run; the x-axis of every log.
        steps: micro-batches of train phases, empty ones included.
        samples: training samples gone through, over all processes, skipped ones included.
        skipped: windows that moved no optimizer.
        skipped_in_a_row: such windows since the last update that counted.
        epoch: number of the current or last train epoch, from 1; 0 before the first.
        windows: windows done in this epoch, counted or skipped: the position in the data.
        epoch_windows: windows of this epoch, of a stream whose pass has ended; else 0.
        epoch_open: the train phase of ``epoch`` has begun and its end has not been reached.
        tests_due: names of the test sets that have to be run before training goes on.
        tested_at: ``updates`` at the last test that the cadence asked for; -1 before any.
        roll_backs: how often the run was rolled back; the order of the data depends on it.
        saves: checkpoints written at this number of updates.
        moved: by optimizer, the updates that moved it.
        ended_early: a step or hook has ended the train phase of ``epoch`` before its data did.
        ending: why the train phase is to end at the next border; empty: it is not.
        seconds: wall time spent, over all interruptions; only where a length or cadence asks.
        tested_seconds: ``seconds`` at the last test that the cadence asked for.
        stage: number of the stage, from 0.
        stage_epochs, stage_updates, stage_skipped, stage_seconds, stage_moved: ``epoch``,
            ``updates``, ``skipped``, ``seconds`` and ``moved`` at its beginning.
    """

    updates: int = 0
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    epoch: int = 0
    windows: int = 0
    epoch_windows: int = 0
    epoch_open: bool = False
    tests_due: list[str] = field(default_factory=list)
    tested_at: int = -1
    roll_backs: int = 0
    saves: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    ended_early: bool = False
    ending: str = ""
    seconds: float = 0.0
    tested_seconds: float = 0.0
    stage: int = 0
    stage_epochs: int = 0
    stage_updates: int = 0
    stage_skipped: int = 0
    stage_seconds: float = 0.0
    stage_moved: dict[str, int] = field(default_factory=dict)

    def moves_in_stage(self, optimizer: str) -> int:
        """Updates of the stage that have moved an optimizer."""
        return self.moved.get(optimizer, 0) - self.stage_moved.get(optimizer, 0)

    def windows_in_stage(self) -> int:
        """Windows of the stage that are done, counted or skipped."""
        return self.updates - self.stage_updates + self.skipped - self.stage_skipped

    def state_dict(self) -> dict[str, Any]:
        """The numbers as plain Python."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the numbers of a checkpoint.

        Raises:
            CheckpointError: the checkpoint lacks one of them or has one that is unknown here.
        """
        names = {f.name for f in fields(self)}
        if set(state) != names:
            raise CheckpointError(
                f"progress holds {sorted(set(state) ^ names)} in only one of checkpoint and "
                f"program: the checkpoint was written by another version"
            )
        for name, value in state.items():
            setattr(self, name, copy.copy(value))
