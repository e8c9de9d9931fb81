"""The time line: what comes at which update of the run: epochs, tests, saves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from phaseloop.engine.events import Hook
from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.progress import Progress
from phaseloop.engine.task import Task
from phaseloop.hooks.checkpoint import Checkpoint

MOST = 5000
"""More places than a picture has room for: of a stage that has more they are not listed."""


@dataclass
class Span:
    """One stage, in updates of the run.

    Attributes:
        name: of the stage; empty: it is the only one.
        start, stop: the updates made at its beginning and at its end; equal where nobody knows.
        epochs: the number of its first epoch in the run, and its length in epochs.
        borders: the updates at which its epochs end, the last one that may be a part included.
        tests: the updates after which all its test sets are run.
        saves: those after which a checkpoint is written, whatever the tests say.
        open: why its end is not known; empty: it is.
        crowded: there are too many places to list, so tests and saves are empty.
    """

    name: str
    start: int
    stop: int
    epochs: tuple[int, float]
    borders: list[int] = field(default_factory=list)
    tests: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    open: str = ""
    crowded: bool = False


def spans(task: Task, hooks: Mapping[str, Hook]) -> list[Span]:
    """The time line of all stages, each as long as planned and no update left out.

    Tests and saves that depend on the time, or on what a test shows, are not in it.
    """
    savers = [hook for hook in hooks.values() if isinstance(hook, Checkpoint)]
    savers = savers if task.folder is not None else []
    plans = task.stages.plans()
    found: list[Span] = []
    progress, before = Progress(), None
    for number, plan in enumerate(plans):
        tested = (id(task.stages.steps[number][0]), plan.test_sets)
        if plan.test_sets and tested != before:
            progress.tested_at = -1  # what was tested at this update was something else
        before = tested
        span = Span(
            task.stages.label(number) if task.stages.several else "",
            plan.origin.updates,
            plan.origin.updates + plan.updates,
            (plan.origin.epochs + 1, plan.epochs),
            open=_open(plan),
        )
        _fill(span, plan, progress, savers, last=number == len(plans) - 1)
        found.append(span)
    return found


def not_drawn(task: Task, hooks: Mapping[str, Hook]) -> list[str]:
    """What may come besides, in words."""
    words = []
    for stage in task.stages.given:
        if stage.test_every_time is not None and task.test_data:
            words.append(f"a test every {stage.test_every_time}")
    if task.folder is not None:
        for hook in hooks.values():
            if isinstance(hook, Checkpoint) and hook.keep_best:
                words.append("a save after each test that is among the best")
            if isinstance(hook, Checkpoint) and hook.every_minutes is not None:
                words.append(f"a save every {hook.every_minutes:g} minutes")
    return list(dict.fromkeys(words))


def _open(plan: PhasePlan) -> str:
    if plan.updates or not plan.trains:
        return ""
    return "its length is a time" if plan.known else "its passes may be of any length"


def _fill(
    span: Span, plan: PhasePlan, progress: Progress, savers: list[Checkpoint], last: bool
) -> None:
    """Walk from place to place as a run would, and ask the plan at each."""
    progress.epoch, progress.updates = plan.origin.epochs, plan.origin.updates
    if plan.test_due_at_start(progress) or (not plan.trains and plan.tests):
        span.tests.append(span.start)
        progress.tested_at = span.start
        over = last and not plan.updates
        if any(over or _by_epochs(saver, progress) for saver in savers):
            span.saves.append(span.start)
    if not plan.updates:
        return
    everything = _places(plan, savers)
    if everything is None:
        span.crowded = True
        return
    for done in everything:
        ends = _move_to(progress, plan, done)
        if ends:
            span.borders.append(progress.updates)
        due = plan.test_due_at_epoch_end if ends else plan.test_due_in_epoch
        if due(progress):
            span.tests.append(progress.updates)
            progress.tested_at = progress.updates
        over = last and done == plan.updates
        if any(_is_saved(saver, progress, ends, over) for saver in savers):
            span.saves.append(progress.updates)


def _is_saved(saver: Checkpoint, progress: Progress, ends: bool, over: bool) -> bool:
    every = saver.every_updates
    by_updates = every is not None and progress.updates % every == 0
    return over or by_updates or (ends and _by_epochs(saver, progress))


def _by_epochs(saver: Checkpoint, progress: Progress) -> bool:
    """At the end of a phase, also of a test before the first epoch."""
    return saver.every_epochs is not None and progress.epoch % saver.every_epochs == 0


def _move_to(progress: Progress, plan: PhasePlan, done: int) -> bool:
    """So many updates of the stage are made; whether an epoch ends with the last of them."""
    progress.updates = plan.origin.updates + done
    if not plan.known:  # of a stream it shows when it does
        progress.epoch, progress.windows = plan.origin.epochs + 1, done
        return done == plan.updates
    before = plan.lengths.before(plan.origin.epochs + 1)
    epochs, windows = plan.lengths.split(before + done)
    progress.epoch = epochs + (windows > 0)
    progress.windows = windows or plan.lengths.of(epochs)
    return windows == 0 or done == plan.updates


def _places(plan: PhasePlan, savers: list[Checkpoint]) -> list[int] | None:
    """Updates of the stage after which something may come, in order; None: too many."""
    places: set[int] = {plan.updates}
    steps = [plan.phases.test_every_updates]
    for source in itertools.chain(
        [_epoch_ends(plan), _parts(plan)],
        (range(step, plan.updates, step) for step in steps if step is not None),
        (_multiples(plan, s.every_updates) for s in savers if s.every_updates is not None),
    ):
        for place in source:
            places.add(place)
            if len(places) > MOST:
                return None
    return sorted(place for place in places if 0 < place <= plan.updates)


def _epoch_ends(plan: PhasePlan) -> Iterator[int]:
    for epoch in itertools.count(1) if plan.known else ():
        end = round(plan.updates_at(epoch))
        if end >= plan.updates:
            return
        yield end


def _parts(plan: PhasePlan) -> Iterator[int]:
    """Where a test within an epoch may be due; the plan has the last word."""
    every = plan.phases.test_every_epochs
    if every is None or every == int(every) or not plan.known:
        return
    for number in itertools.count(1):
        near = plan.updates_at(number * every)
        if near > plan.updates:
            return
        yield from (math.floor(near), math.ceil(near))


def _multiples(plan: PhasePlan, every: int) -> Iterator[int]:
    """Of updates of the run."""
    first = every * (plan.origin.updates // every + 1) - plan.origin.updates
    yield from range(first, plan.updates, every)
