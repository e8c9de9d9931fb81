"""The plan in words, for the console's header and ``plan=true``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.report import by_epoch, counted

if TYPE_CHECKING:
    from phaseloop.engine.data.loaders import AnyLoader
    from phaseloop.engine.task import Task


def length(plan: PhasePlan) -> str:
    """``230 updates in 10 epochs of 23``, ``1h 30m``, or both where both are a length."""
    parts = []
    if plan.updates and not plan.known:
        parts.append(f"{counted(plan.updates, 'update')} in passes of unknown length")
    elif plan.updates:
        epochs = f"{plan.epochs:.4g} epoch{'' if plan.epochs == 1 else 's'}"
        windows = by_epoch(plan.lengths.steps)
        parts.append(f"{counted(plan.updates, 'update')} in {epochs} of {windows}")
    if plan.endless and plan.phases.epochs is not None:
        most = plan.phases.updates
        limit = "" if most is None else f", at most {counted(most, 'update')}"
        parts.append(f"{counted(int(plan.phases.epochs), 'epoch')} of unknown length{limit}")
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
    epochs = planned_epochs(plan)
    of_epochs = f" of {epochs}" if epochs else ""
    of_updates = f" of {plan.updates:,}" if plan.updates else ""
    stage = f"stage {task.stages.label(progress.stage)}, " if task.stages.several else ""
    return (
        f"{stage}{where} epoch {plan.epoch(progress)}{of_epochs}, "
        f"after update {plan.updates_done(progress):,}{of_updates}"
    )


def planned_epochs(plan: PhasePlan) -> int:
    """Epochs of the stage, the last of them perhaps a part of one; 0 where nobody knows."""
    if plan.known:
        return math.ceil(plan.epochs) if plan.updates else 0
    only_epochs = plan.phases.updates is None and plan.phases.epochs is not None
    return int(plan.phases.epochs or 0) if only_epochs else 0


def samples(loader: AnyLoader) -> str:
    """``1,438 samples``, or ``a stream``."""
    if loader.samples is None:
        return "a stream"
    stream = "a stream of " if loader.is_stream else ""
    return f"{stream}{counted(loader.samples, 'sample')}"


def epoch(task: Task) -> str:
    """``epoch  3/10``, in the stage; the stage's name before it, where there are several."""
    plan = task.plan
    number, epochs = plan.epoch(task.progress), planned_epochs(plan)
    stage = f"{task.stages.label(task.progress.stage)} " if task.stages.several else ""
    if not epochs:
        return f"{stage}epoch {number}"
    return f"{stage}epoch {number:>{len(str(epochs))}}/{epochs}"


def _every(number: float, unit: str) -> str:
    return f"every {unit}" if number == 1 else f"every {number:,} {unit}s"
