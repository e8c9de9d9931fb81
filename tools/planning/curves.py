"""The curves of all schedules: what every update of the run will use."""

from __future__ import annotations

from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.task import Task

POINTS = 400
"""More than a picture has pixels to show."""


class Curves:
    """Values of every scheduled option over the run's updates.

    Attributes:
        lines: by optimizer, option and group, the updates and the values.
        panels: every optimizer and option, in order.
        borders: the updates after which a stage begins.
        risen: the updates at which a warm-up is over.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str, int], tuple[list[int], list[float]]] = {}
        self.panels: dict[tuple[str, str], None] = {}
        self.borders: list[int] = []
        self.risen: list[float] = []

    def look(self, task: Task, update: int) -> None:
        """Take down what update number ``update`` of the run uses."""
        for name, rates in task.rates.items():
            for option in rates.options:
                self.panels[name, option] = None
                for index, value in rates.values(option):
                    places, values = self.lines.setdefault((name, option, index), ([], []))
                    places.append(update)
                    values.append(value)


def follow(task: Task) -> Curves:
    """The curves of all stages, each as long as planned; the last stage is then the one at hand."""
    plans = task.stages.plans()
    curves, total = Curves(), sum(plan.updates for plan in plans)
    for number, plan in enumerate(plans):
        if number:
            _enter(task, number, plan)
        if not plan.updates:
            continue
        if plan.origin.updates:
            curves.borders.append(plan.origin.updates)
        _note_rises(curves, task, plan)
        points = max(1, round(POINTS * plan.updates / total))
        for k in sorted({round(i * (plan.updates - 1) / points) for i in range(points + 1)}):
            for name, rates in task.rates.items():
                # Where nobody knows when epochs begin, nothing is scheduled by them.
                epochs = int(plan.epochs_at(k)) if plan.known else 0
                rates.set(k // task.every[name], epochs)
            curves.look(task, plan.origin.updates + k + 1)
    return curves


def not_drawn(task: Task) -> list[str]:
    """The stages whose curves are not there, and why."""
    return [
        f"{task.stages.label(number)}, "
        + ("whose length is a time" if plan.known else "whose passes may be of any length")
        for number, plan in enumerate(task.stages.plans())
        if plan.trains and not plan.updates
    ]


def _note_rises(curves: Curves, task: Task, plan: PhasePlan) -> None:
    for name, rates in task.rates.items():
        for schedule in rates.schedules:
            if schedule.rise:
                curves.risen.append(plan.origin.updates + schedule.rise * task.every[name])


def _enter(task: Task, number: int, plan: PhasePlan) -> None:
    """Make a stage the one at hand, as if those before it were done."""
    progress = task.progress
    progress.stage = number
    progress.epoch = progress.stage_epochs = plan.origin.epochs
    progress.updates = progress.stage_updates = plan.origin.updates
    task.stages.enter()
