"""Parts: what a run is doing, told to who watches: data, forward, loss, backward, update, hooks.

Nothing of it is there until somebody watches, so that a step costs what it does without. Then what
the loop and the step call is wrapped, and put back when nobody watches any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from phaseloop.engine.stopwatch import HOOK

if TYPE_CHECKING:
    from phaseloop.engine.step_facts import Step
    from phaseloop.engine.task import Task

DATA, FORWARD, LOSS, METERS = "data", "forward", "loss", "meters"
BACKWARD, UPDATE, STEP, PROCESSES, DEVICE = "backward", "update", "step", "processes", "device"

PARTS = {
    DATA: "waiting for a batch, and bringing it to the device",
    FORWARD: "task.forward and task.compute",
    LOSS: "task.criterion",
    METERS: "the meters take a loss and an output in",
    BACKWARD: "task.backward; with ddp the processes add their gradients up in it",
    UPDATE: "task.update: weighting, clipping, the optimizers",
    STEP: "what else the train step does",
    PROCESSES: "talking to other processes, and waiting for them",
    DEVICE: "on a lazy device (XLA): compiling and running what was noted down",
}
"""Every part but those of hooks, and what it is."""

_OF_TASK = {
    "_fetch": DATA,
    "_prepared": DATA,
    "forward": FORWARD,
    "compute": FORWARD,
    "criterion": LOSS,
    "measure": METERS,
    "measure_parts": METERS,
    "backward": BACKWARD,
    "update": UPDATE,
    "_close_window": UPDATE,  # of a step that does not say update
    "_tell_others": PROCESSES,
}
_OF_AGREEMENT = ("close", "meet", "skips", "check_weights")


class Watcher(Protocol):
    """Who is told. Parts lie within each other: a hook in ``forward``, ``forward`` in a closure."""

    def enter(self, part: str) -> None:
        """A part begins: a key of :data:`PARTS`, or ``hook/NAME``."""

    def leave(self, part: str) -> None:
        """The same part ends, by an error too."""

    def between(self) -> None:
        """The trainer looks for the next phase; what it finds may be the run's end."""

    def phase(self, name: str) -> None:
        """It goes into a phase, or back into one: its name, before it that of its stage."""


class Parts:
    """The parts of a task's run.

    Args:
        task: the task.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._watchers: tuple[Watcher, ...] = ()
        self._wrapped: list[tuple[object, str, Any, Any]] = []

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` from now on; the step's own part from the next phase on.

        To be called at ``on_start`` or later.
        """
        self._watchers = (*self._watchers, watcher)
        if len(self._watchers) == 1:
            self._wrap()

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it no more; nothing where it is not told."""
        watched = bool(self._watchers)
        self._watchers = tuple(one for one in self._watchers if one is not watcher)
        if watched and not self._watchers:
            self._put_back()

    def phase_name(self) -> str:
        """The phase at hand: ``train``, ``test``, or in one of several stages ``warm/train``."""
        task = self._task
        stage = f"{task.stages.label(task.progress.stage)}/" if task.stages.several else ""
        return stage + task.phase.name

    def _wrap(self) -> None:
        task = self._task
        for name, part in _OF_TASK.items():
            self._wrap_one(task, name, part)
        if task.agreement is not None:
            for name in _OF_AGREEMENT:
                self._wrap_one(task.agreement, name, PROCESSES)
            self._wrap_one(task.backend, "reduce_gradients", PROCESSES)
        if task.backend.lazy:
            self._wrap_one(task.backend, "mark_step", DEVICE)
        self._set(task, "advance_phase", self._advance(task.advance_phase))
        task.hooks.call_through(lambda hook, method: self._around(HOOK + hook, method))
        task.stages.guard_steps(self._guard)

    def _put_back(self) -> None:
        self._task.stages.unguard_steps(self._guard)
        self._task.hooks.call_through(None)
        for owner, name, ours, before in self._wrapped:
            if vars(owner).get(name) is not ours:
                continue  # somebody has wrapped it once more, and calls it
            if before is None:
                delattr(owner, name)  # its class has the method itself
            else:
                setattr(owner, name, before)
        self._wrapped = []

    def _guard(self, step: Step) -> Step:
        return self._around(STEP, step)

    def _wrap_one(self, owner: object, name: str, part: str) -> None:
        self._set(owner, name, self._around(part, getattr(owner, name)))

    def _set(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        self._wrapped.append((owner, name, function, vars(owner).get(name)))
        setattr(owner, name, function)

    def _around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **options: Any) -> Any:
            watchers = self._watchers
            for watcher in watchers:
                watcher.enter(part)
            try:
                return function(*args, **options)
            finally:
                for watcher in reversed(watchers):
                    watcher.leave(part)

        return around

    def _advance(self, advance: Callable[[], bool]) -> Callable[[], bool]:
        @wraps(advance)
        def around() -> bool:
            for watcher in self._watchers:
                watcher.between()
            there = advance()
            if there:
                name = self.phase_name()
                for watcher in self._watchers:
                    watcher.phase(name)
            return there

        return around
