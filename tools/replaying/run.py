"""Running a part of a run again: the same engine, the same hooks, and nothing of it is written."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
from collections.abc import Callable, Mapping

from phaseloop.engine import rng
from phaseloop.engine.checkpoint import store
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.events import Hook
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome, Trainer
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.tools.replaying.follow import Follower, no_such_update
from phaseloop.tools.replaying.measure import Tap

Make = Callable[[], tuple[Task, Mapping[str, Hook]]]
"""Makes the task of a run and its hooks, anew each time."""


def run(make: Make, start: store.Saved | None, follower: Follower) -> Outcome:
    """Train from a checkpoint on, in no folder, until the follower has seen enough.

    Args:
        make: of the run's task and hooks.
        start: where to begin; None: at the beginning of the run.
        follower: sees every update.

    Raises:
        Whatever user code raises.
    """
    host = rng.HostGenerators()
    try:
        task, hooks = make()
        device = task.backend.rng_state()
        try:
            task.folder = None
            task.run = dataclasses.replace(task.run, dir=None, resume="auto")
            task.recorder = follower.tap = Tap(task.run.log_every)
            follower.start = start
            follower.prepare(task, hooks)
            clock = {"replay: clock": follower.clock, "replay": follower}
            return Trainer(task, {**taking_part(hooks), **clock}).train(start)
        finally:
            task.backend.set_rng_state(device)
    finally:
        host.put_back()


def taking_part(hooks: Mapping[str, Hook]) -> dict[str, Hook]:
    """The hooks that change the training; for each of the others one that does nothing.

    What stops a run for a value that is not finite is left out too: a replay goes on and looks.
    """
    return {
        name: Hook()
        if hook.only_watches or hook.saves or (isinstance(hook, NonFinite) and _only_stops(hook))
        else hook
        for name, hook in hooks.items()
    }


def _only_stops(hook: NonFinite) -> bool:
    return hook.policy != "skip"


def follow(make: Make, start: store.Saved | None, follower: Follower) -> str:
    """Run until the follower is done; what update ``first`` raised, if it raised something.

    Raises:
        ConfigError: the run ends before the last update that is asked for.
        PhaseloopError: an earlier update cannot be run again.
    """
    try:
        outcome = run(make, start, follower)
    except Exception as error:
        if not follower.begun or isinstance(error, ConfigError):
            raise
        if follower.reached < follower.first - 1:
            at = follower.reached + 1
            raise PhaseloopError(
                f"update {at}, before {follower.first}, raises {type(error).__name__}: {error}; "
                f"look at it with update={at}"
            ) from error
        return f"{type(error).__name__}: {error}"
    if outcome.signal is not None:
        signal.raise_signal(outcome.signal)  # the handlers are what they were before
        raise KeyboardInterrupt
    if follower.reached < follower.last:
        why = outcome.reason or "its length is reached"
        key = "update" if follower.last == follower.first else "until"
        told = f"the run ends after update {outcome.updates} ({why})"
        raise no_such_update(follower.last, told, key)
    return ""


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for a snapshot."""
    return tempfile.TemporaryDirectory(prefix="replay-")
