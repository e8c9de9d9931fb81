"""Trainer: the loop. Everything else is a task, a train step or a hook."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from phaseloop.engine import alike, outcomes, registry, replica, shards
from phaseloop.engine.backends.primary import on_primary
from phaseloop.engine.checkpoint import contents, resume, weights
from phaseloop.engine.checkpoint.store import Saved
from phaseloop.engine.console_handler import ConsoleHandler
from phaseloop.engine.data import failed
from phaseloop.engine.environment import Environment
from phaseloop.engine.errors import (
    CheckpointError,
    ConfigError,
    InUseError,
    PeerError,
    PhaseloopError,
)
from phaseloop.engine.events import Dispatcher, Hook
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.lost_place import check_folder, check_place, lost_place
from phaseloop.engine.run_folder import ONLY_FILE
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: ``finished``, ``stopped`` (by a signal or a request) or ``failed``.
        reason: why, in words.
        signal: number of the signal that stopped it, or None.
        updates: updates made, over all interruptions.
        seconds: wall time of this process's part.
        final: the last value of every metric.
        best: the best value of every metric whose direction is known.
    """

    status: str
    reason: str = ""
    signal: int | None = None
    updates: int = 0
    seconds: float = 0.0
    final: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)


_ELSEWHERE = "another process has failed"
_SAID_BY_THE_CALLER = (ConfigError, InUseError, CheckpointError)


class Trainer:
    """Walks a task through its phases.

    Args:
        task: what to train.
        hooks: instance name to hook; None: those that are registered as defaults.

    Raises:
        ConfigError: ``hooks`` is None and no hooks are registered.
    """

    def __init__(self, task: Task, hooks: Mapping[str, Hook] | None = None) -> None:
        self.task = task
        hooks = registered_defaults() if hooks is None else hooks
        if task.backend.world_size == 1:
            hooks = {name: hook for name, hook in hooks.items() if not hook.for_processes}
        self.hooks = Dispatcher(hooks)
        self._started = 0.0
        self._start_from: Saved | Callable[[], Saved] | None = None
        self._begun = False
        self._running = False

    def train(self, start: Saved | None = None) -> Outcome:
        """Train from where the run's folder stands to the end.

        Args:
            start: a verified checkpoint to start from, whatever the folder holds.

        Returns:
            How it ended: finished, or stopped by a signal or a request.

        Raises:
            Exception: whatever user code raised; hooks have seen it, and ``status.json`` says
                failed.
        """
        self._start_from = start
        return self._run()

    def test(self, saved: Saved | Callable[[], Saved]) -> Outcome:
        """Run every test set once on the weights of a checkpoint; the run's folder is not touched.

        Args:
            saved: a verified checkpoint; or what finds it: of several processes the primary calls
                it, and all take what it has found.
        """
        self.task.folder = None
        self.task.test_only = True
        self._start_from = saved
        return self._run()

    def _run(self) -> Outcome:
        self._started = time.monotonic()
        life = _Life(self.task)
        try:
            life.begin()
            self._start()
            self._walk()
            outcome = self._outcome("stopped" if self.task.stop_reason else "finished")
        except BaseException as error:
            told = self._told(error)
            self._fail(told or error)
            if told is not None:
                cause = error.__cause__ if isinstance(error, CheckpointError) else error
                raise told from (told.__cause__ or cause)
            raise
        else:
            return self._end(outcome)
        finally:
            life.end()

    def _told(self, error: BaseException) -> PhaseloopError | None:
        """What an error comes from, where it does not say so itself."""
        # What is written into a folder that was moved fails in as many ways as there are hooks.
        if isinstance(error, OSError | CheckpointError):
            return lost_place(self.task)
        followed = self.task.backend.followed_from(error)
        if followed is not None:
            return followed
        waited = self.task.backend.waited_in_vain(error)
        return PeerError(waited) if waited else None

    def _walk(self) -> None:
        """The loop."""
        task, hooks = self.task, self.hooks
        lazy = task.backend.lazy
        while task.advance_phase():
            train_step = task.train_step
            if task.phase.fresh:
                task.phase.fresh = False
                task.stages.tell_step("on_phase_start")
                hooks.on_phase_start(task)
            if lazy:  # what a border has left to do is no part of a step's program
                task.backend.mark_step()
            while task.has_batch():
                if not task.step_is_empty:  # a collate function that gave None is skipped
                    train_step(task)
                task.commit()
                if lazy:
                    task.backend.mark_step()
                hooks.on_step(task)
            if task.phase.done:
                if lazy:  # nor of what is read here
                    task.backend.mark_step()
                task.stages.tell_step("on_phase_end")
                hooks.on_phase_end(task)
        hooks.on_loop_end(task)

    def _start(self) -> None:
        """Build; restore model, optimizers, progress; on_start; hooks; random states."""
        task, hooks = self.task, self.hooks
        task.hooks = hooks
        task.before_save.append(check_place)
        task.build()
        alike.check(task)
        saved = self._checkpoint()
        state = contents.restore(task, saved) if saved is not None else None
        task.resumed = state is not None
        if saved is not None and state is not None:
            task.resumed_from = str(saved.path)
            log.info("%s %s", "testing" if task.test_only else "continuing from", saved.path)
            resume.warn_about_environment(task, state)
            resume.warn_about_length(task, state)
        else:
            weights.start(task)
            task.seed_all()
        alike.check_start(task, saved)
        if task.agreement is not None:
            task.agreement.meet()
        self._begun = True
        check_folder(task)  # building may have taken long
        hooks.on_start(task)
        if task.test_only:
            task.metrics, task.best = {}, {}
            task.make_tests_due()
        elif state is not None:
            for name in hooks.load_state_dict(state["hooks"]):
                log.warning(
                    "the checkpoint holds state of a hook %r that is not in use", name, extra=ALIKE
                )
            hooks.on_resume(task)
            contents.restore_random(task, state)
        # Only now: a hook that refuses its options leaves an old run's files as they were.
        self._running = True
        task.running_status = lambda: _status(self._outcome("running"))
        self._write_status(self._outcome("running"))
        if task.folder is not None and task.primary and task.config:
            task.folder.write_config(task.config)

    def _checkpoint(self) -> Saved | None:
        """The one to start from; None: from the beginning."""
        if callable(self._start_from):
            return resume.chosen_by_primary(self.task, self._start_from)
        return self._start_from or resume.find(self.task)

    def _end(self, outcome: Outcome) -> Outcome:
        errors = self.hooks.call_isolated("on_end", self.task, outcome)
        if errors:
            self._write_status(self._outcome("failed", _describe(errors[0])))
            for error in errors[1:]:
                log.error("also, in on_end: %s", _describe(error))
            raise errors[0]
        self._write_status(outcome)
        return outcome

    def _fail(self, error: BaseException) -> None:
        """Tell the hooks; an error of theirs hides neither the first nor the others' calls."""
        task = self.task
        lost = task.backend.world_size > 1 and outcomes.is_lost(error)
        # What another process has said itself of its error is in a PeerError.
        told = _ELSEWHERE if lost and not isinstance(error, PeerError) else _describe(error)
        outcome = self._outcome("failed", told)
        task.backend.failed(error)
        hint = _hint(error)
        # Whoever called says these in a sentence; twice would be once too often. What only follows
        # from another process's error is said there.
        said = lost or isinstance(error, _SAID_BY_THE_CALLER)
        extra = ONLY_FILE if said else None
        shown = f" ({hint})" if hint else ""
        log.error("%s%s", _describe(error), shown, extra=extra, exc_info=error)
        if self._begun:  # else nothing of the run in the folder has changed: what it says stands
            later = self.hooks.call_isolated("on_exception", task, error)
            later += self.hooks.call_isolated("on_end", task, outcome)
            later += self._try_to_write_status(outcome)
            homeless = lost_place(task) is not None
            for other in later:
                if homeless and isinstance(other, OSError | CheckpointError):
                    continue  # it follows from that, which is said
                log.error("also, while ending: %s", _describe(other))

    def _try_to_write_status(self, outcome: Outcome) -> list[BaseException]:
        try:
            if self._running:
                self._write_status(outcome)
        except (OSError, PhaseloopError) as error:
            return [error]
        return []

    def _write_status(self, outcome: Outcome) -> None:
        if self.task.folder is not None and self.task.primary:
            check_folder(self.task)
            self.task.folder.write_status(_status(outcome))

    def _outcome(self, status: str, reason: str = "") -> Outcome:
        task = self.task
        return Outcome(
            status=status,
            reason=reason or task.stop_reason,
            signal=task.signals.received,
            updates=task.progress.updates,
            seconds=time.monotonic() - self._started,
            final=dict(task.metrics),
            best=dict(task.best),
        )


class _Life:
    """What surrounds a run in its process: folder, log, signals, settings.

    Each is put back by :meth:`end`, whatever the others raise.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._undo = ExitStack()

    def begin(self) -> None:
        task, undo = self._task, self._undo
        if replica.mine() is None:  # of several threads one would set it while others still speak
            undo.callback(log.setLevel, log.level)
        log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
        if not log.handlers or replica.mine() is not None:
            console = ConsoleHandler() if task.primary else logging.NullHandler()
            undo.callback(log.removeHandler, console)
            log.addHandler(replica.keep_to_mine(console))
        undo.callback(task.backend.teardown)
        task.backend.setup()
        if task.folder is not None:
            undo.callback(task.folder.close)
        if on_primary(task.backend, self._open_folder) != (task.folder is not None):
            raise ConfigError("run.dir", "one process has a folder, and another has none")
        if task.folder is not None:
            undo.callback(task.folder.stop_log)
            task.folder.start_log(task.backend.rank)
        undo.callback(task.signals.restore)
        task.signals.install()
        environment = Environment(task.run)
        undo.callback(environment.put_back)
        environment.apply()
        undo.callback(task.close)
        undo.callback(task.leave_phase)

    def _open_folder(self) -> bool:
        """Whether there is one."""
        task = self._task
        if task.folder is not None:
            resume.open_folder(task.folder, task.run.resume, task.store)
        return task.folder is not None

    def end(self) -> None:
        """Undo everything, last first; an error in it never hides an earlier one."""
        earlier = sys.exc_info()[1]
        try:
            self._undo.close()
        except Exception as error:
            if earlier is None:
                raise
            log.error("also, while cleaning up: %s", _describe(error))


def registered_defaults() -> dict[str, Hook]:
    """The hooks that are registered as defaults, made without options, by name."""
    found = {entry.name: entry.target() for entry in registry.hooks if entry.declared["default"]}
    if not found:
        raise ConfigError("hooks", "none are registered: import phaseloop.hooks, or pass hooks={}")
    return found


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _hint(error: BaseException) -> str:
    if "deterministic" in str(error) and isinstance(error, RuntimeError):
        return "run.deterministic=false allows operations without a deterministic form"
    if "mixed torch.Tensor and DTensor" in str(error):
        return shards.CALLED_A_PART
    return failed.said(error)


def _status(outcome: Outcome) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "updates": outcome.updates,
        "seconds": round(outcome.seconds, 3),
        "final": _plain(outcome.final),
        "best": _plain(outcome.best),
    }


def _plain(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no word for NaN and infinities: they are written as strings."""
    finite = (float("-inf"), float("inf"))
    return {k: v if finite[0] < v < finite[1] else str(v) for k, v in metrics.items()}
