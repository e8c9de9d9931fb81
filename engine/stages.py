"""Stages: groups of phases with settings of their own, one after the other."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseloop.engine import optimizers
from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.freezing import Matched
from phaseloop.engine.phase_plan import Origin, PhasePlan
from phaseloop.engine.phases import TRAIN, Phases
from phaseloop.engine.step_facts import Step, StepFacts, resolve_step

if TYPE_CHECKING:
    from phaseloop.engine.data.loaders import AnyLoader
    from phaseloop.engine.data.source import Data
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

Guard = Callable[[Step], Step]

OWNER = "phases"
"""Who holds frozen what a stage freezes."""


@dataclass
class Stage(Phases):
    """A stage: its length and cadence, and what is different in it.

    Epochs, updates and times count from its beginning, and its schedules run over its own length.
    Epochs are numbered through the whole run all the same, so that each has an order of its own.

    Args:
        name: of the stage, for logs and messages.
        repeat: so many times in a row; its schedules begin anew each time.
        train: training data; None: the task's.
        test_sets: names of the test sets that are run; None: all.
        train_step: name of a registered step, or a step itself; None: the task's.
        schedule: as for the task; None: the task's.
        freeze: patterns of parameters, or of modules, that are not trained in it.
    """

    name: str = ""
    repeat: int = 1
    train: Data | None = None
    test_sets: Sequence[str] | None = None
    train_step: str | Step | None = None
    schedule: Any = None
    freeze: Sequence[str] = ()

    def key(self, number: int) -> str:
        """Where the stage stands in the configuration."""
        return f"phases.{self.name or number}"

    def check(self, key: str = "phases") -> None:
        """Raises ConfigError for a number out of range; see :meth:`Phases.check`."""
        super().check(key)
        if self.repeat < 1:
            raise ConfigError(f"{key}.repeat", f"{self.repeat} is less than 1")


def stages_of(phases: Phases | Sequence[Stage]) -> list[Stage]:
    """What a user gave as stages, those that are repeated as often as they are.

    Raises:
        ConfigError: something else was given, there are none, or two have one name.
    """
    if isinstance(phases, Phases) and not isinstance(phases, Stage):
        return [Stage(**{f.name: getattr(phases, f.name) for f in dataclasses.fields(Phases)})]
    given = [phases] if isinstance(phases, Stage) else phases
    if not isinstance(given, Sequence) or not given:
        raise ConfigError("phases", "give Phases, or a list of stages")
    for number, stage in enumerate(given):
        if not isinstance(stage, Stage):
            raise ConfigError(
                f"phases.{number}", f"a {type(stage).__name__} was given where a Stage is due"
            )
        stage.check(stage.key(number) if len(given) > 1 else "phases")
    names = [stage.name for stage in given]
    if len(given) > 1 and (len(set(names)) < len(names) or not all(names)):
        raise ConfigError("phases", f"give every stage a name of its own; got {names}")
    return [stage for stage in given for _ in range(stage.repeat)]


class Stages:
    """The stages of a task, and the one at hand.

    Args:
        task: the task.
        given: its stages, in order, repetitions included.

    Attributes:
        steps: the step of each stage, and its facts.
        loaders: the loader of each stage's training data; filled when the task is built.
    """

    def __init__(self, task: Task, given: Sequence[Stage], train_step: str | Step) -> None:
        self._task = task
        self.given = list(given)
        default = resolve_step(train_step)
        # By name: a stage that is repeated goes on with its step, and what that remembers.
        own = {s.name: resolve_step(s.train_step) for s in self.given if s.train_step is not None}
        self.steps: list[tuple[Step, StepFacts]] = [
            own.get(stage.name, default) for stage in self.given
        ]
        self.loaders: list[AnyLoader | None] = []
        self._guards: list[Guard] = []
        self._check()

    @property
    def several(self) -> bool:
        """There is more than one."""
        return len(self.given) > 1

    @property
    def updates(self) -> int:
        """Updates planned for all stages; those whose length is a time count as 0."""
        return sum(plan.updates for plan in self.plans())

    def check_comes(self, metric: str, key: str) -> None:
        """Raises ConfigError for a metric, ``test/loss``, of a test set that is never run."""
        phase = metric.partition("/")[0]
        if phase == TRAIN or self._task.test_only:
            return
        plans = [plan for plan in self.plans() if phase in plan.test_sets]
        if not any(plan.tests or not plan.trains for plan in plans):
            raise ConfigError(
                key,
                f"{metric!r} never comes, since {phase} is never run: set "
                f"phases.test_every_epochs, test_every_updates or test_every_time",
            )

    def data(self, stage: Stage) -> Data | None:
        """The training data of a stage."""
        return self._task.train_data if stage.train is None else stage.train

    def label(self, number: int) -> str:
        """What a stage is called, and which time of several it is."""
        stage = self.given[number]
        times = sum(other.name == stage.name for other in self.given[: number + 1])
        return f"{stage.name} {times}/{stage.repeat}" if stage.repeat > 1 else stage.name

    def enter(self) -> None:
        """Make the stage that ``progress`` is in the one at hand."""
        task, progress = self._task, self._task.progress
        number = progress.stage
        stage = self.given[number]
        task.phases = stage
        step, task.step_facts = self.steps[number]
        task.train_step = self._guarded(step)
        loader = self.loaders[number] if self.loaders else None
        if loader is not None and not task.test_only:
            task.loaders[TRAIN] = loader
        origin = Origin(progress.stage_epochs, progress.stage_updates, progress.stage_seconds)
        task.plan = self.plan(number, origin)
        task.freezing.release(OWNER)
        if stage.freeze and task.optimizers:
            matched = self._frozen(stage)
            task.freezing.check_left(task.trainable, matched, f"phases.{stage.name}.freeze")
            task.freezing.hold(OWNER, matched)
        whole = task.plan if task.debug.fast is None else self._whole_plan(number, origin)
        optimizers.plan_rates(task, whole, self._schedule(stage), self.data(stage))

    def check(self) -> None:
        """What a later stage would stumble over is said at the start.

        Raises:
            ConfigError: a schedule does not fit into a stage, or a pattern matches nothing.
        """
        for number, (stage, plan) in enumerate(zip(self.given, self.plans(), strict=True)):
            self._frozen(stage)
            whole = plan if self._task.debug.fast is None else self._whole_plan(number, plan.origin)
            optimizers.planned_schedules(self._task, whole, self._schedule(stage), self.data(stage))

    def _frozen(self, stage: Stage) -> Matched:
        return self._task.freezing.match(stage.freeze, f"phases.{stage.name}.freeze")

    def _schedule(self, stage: Stage) -> Any:
        return self._task.schedules if stage.schedule is None else stage.schedule

    def guard_steps(self, guard: Guard) -> None:
        """Have what ``guard`` makes of a step called in its place, in this stage and the next.

        Of several the last is the outermost. The phase at hand goes on with what it has begun with.
        """
        self._guards.append(guard)
        self._task.train_step = self._guarded(self.steps[self._task.progress.stage][0])

    def unguard_steps(self, guard: Guard) -> None:
        """The reverse of :meth:`guard_steps`."""
        self._guards = [one for one in self._guards if one != guard]
        self._task.train_step = self._guarded(self.steps[self._task.progress.stage][0])

    def _guarded(self, step: Step) -> Step:
        for guard in self._guards:
            step = guard(step)
        return step

    def tell_step(self, event: str) -> None:
        """Call the method of this name of the step at hand, where it has one, with the task."""
        step, _ = self.steps[self._task.progress.stage]
        method = getattr(step, event, None)
        if callable(method):
            method(self._task)

    def go_on(self) -> bool:
        """Enter the next stage; False: there is none."""
        task, progress = self._task, self._task.progress
        if progress.stage + 1 >= len(self.given) or task.test_only:
            return False
        tested = self._tested()
        progress.stage += 1
        progress.stage_epochs = progress.epoch
        progress.stage_updates = progress.updates
        progress.stage_skipped = progress.skipped
        progress.stage_seconds = progress.seconds
        progress.stage_moved = dict(progress.moved)
        progress.ended_early = False
        self.enter()
        if task.plan.test_sets and self._tested() != tested:
            progress.tested_at = -1  # what was tested at this update was something else
        log.info("stage %s", self.label(progress.stage))
        return True

    def _tested(self) -> tuple[int, list[str]]:
        """What a test in the stage at hand is: its step and its sets."""
        step, _ = self.steps[self._task.progress.stage]
        return id(step), self._task.plan.test_sets

    def plan(self, number: int, origin: Origin) -> PhasePlan:
        """The plan of one stage that begins at ``origin``."""
        stage = self.given[number]
        tests = list(self._task.test_data)
        if stage.test_sets is not None and not self._task.test_only:
            tests = list(stage.test_sets)
        return PhasePlan(stage, self._windows(number), tests, origin)

    def plans(self) -> list[PhasePlan]:
        """The plans of all stages, if each is as long as planned."""
        found: list[PhasePlan] = []
        origin = Origin()
        for number in range(len(self.given)):
            plan = self.plan(number, origin)
            found.append(plan)
            # Of a stream nobody knows how many epochs it takes: as if it were none.
            epochs = -int(-plan.epochs // 1) if plan.known else 0
            origin = Origin(origin.epochs + epochs, origin.updates + plan.updates)
        return found

    def _whole_plan(self, number: int, origin: Origin) -> PhasePlan:
        """The plan that a quick try is the beginning of: schedules are spread over it."""
        whole = self._task.whole_phases[number]
        return PhasePlan(whole, self._windows(number, whole=True), [], origin)

    def _windows(self, number: int, whole: bool = False) -> Mapping[int, int | float]:
        loader = self.loaders[number] if self.loaders else None
        if loader is None or self._task.test_only:
            return {1: 0}
        plans = loader.plans.items()
        if whole:
            return {n: dataclasses.replace(plan, at_most=None).windows for n, plan in plans}
        return {n: plan.windows for n, plan in plans}

    def _check(self) -> None:
        known = list(self._task.test_data)
        for stage in self.given:
            for name in stage.test_sets or ():
                if name not in known:
                    raise ConfigError(
                        f"phases.{stage.name}.test_sets",
                        f"no test set is called {name!r}.{nearest(name, known)} "
                        f"There are: {listing(known)}",
                    )
