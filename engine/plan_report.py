"""The plan in words, for the console's header and ``plan=true``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.report import by_epoch, counted

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


def length(plan: PhasePlan) -> str:
    """``230 updates in 10 epochs of 23``, ``1h 30m``, or both where both are a length."""
    parts = []
    if plan.updates:
        epochs = f"{plan.epochs:.4g} epoch{'' if plan.epochs == 1 else 's'}"
        windows = by_epoch(plan.lengths.steps)
        parts.append(f"{counted(plan.updates, 'update')} in {epochs} of {windows}")
    if plan.phases.time is not None:
        parts.append(f"at most {plan.phases.time}" if parts else str(plan.phases.time))
    return ", ".join(parts) or "nothing"


def cadence(plan: PhasePlan) -> str:
    """``test every epoch and every 100 updates``; empty where nothing is tested."""
    phases = plan.phases
    if not plan.test_sets:
        return ""
    every = [
        _every(number, unit)
        for number, unit in (
            (phases.test_every_epochs, "epoch"),
            (phases.test_every_updates, "update"),
        )
        if number is not None
    ]
    if phases.test_every_time is not None:
        every.append(f"every {phases.test_every_time}")
    if phases.test_at_start:
        every.insert(0, "at the start")
    return f"test {' and '.join(every)}" if every else ""


def position(task: Task) -> str:
    """Where the run stands: ``in epoch 3 of 10, after update 52 of 230``."""
    progress, plan = task.progress, task.plan
    where = "in" if progress.epoch_open else "after"
    of_epochs = f" of {math.ceil(plan.epochs)}" if plan.updates else ""
    of_updates = f" of {plan.updates:,}" if plan.updates else ""
    stage = f"stage {task.stages.label(progress.stage)}, " if task.stages.several else ""
    return (
        f"{stage}{where} epoch {plan.epoch(progress)}{of_epochs}, "
        f"after update {plan.updates_done(progress):,}{of_updates}"
    )


def epoch(task: Task) -> str:
    """``epoch  3/10``, in the stage; the stage's name before it, where there are several."""
    plan = task.plan
    number, planned = plan.epoch(task.progress), str(math.ceil(plan.epochs))
    stage = f"{task.stages.label(task.progress.stage)} " if task.stages.several else ""
    if not plan.updates:
        return f"{stage}epoch {number}"
    return f"{stage}epoch {number:>{len(planned)}}/{planned}"


def _every(number: float, unit: str) -> str:
    return f"every {unit}" if number == 1 else f"every {number:,} {unit}s"
