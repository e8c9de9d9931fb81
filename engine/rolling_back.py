"""Rolling back: a run goes on from its last checkpoint, with its data in another order.

What is in no checkpoint stays as it is, such as buffers that are not saved (``persistent=False``).

What went wrong depends on the order of the samples, and would go wrong again. The number of
roll-backs is part of what that order is a function of.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phaseloop.engine.checkpoint import contents
from phaseloop.engine.checkpoint.resume import chosen_by_primary
from phaseloop.engine.errors import NonFiniteError, PhaseloopError
from phaseloop.engine.log_file import ALIKE

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def roll_back(task: Task, reason: str, most: int) -> None:
    """Restore the newest whole checkpoint in this process, and count the roll-back.

    Args:
        reason: what has gone wrong.
        most: roll-backs that the run may make.

    Raises:
        NonFiniteError: there is no checkpoint, or the run has rolled back so often already.
        PhaseloopError: a hook has a state now and had none then, so that it cannot go back.
    """
    done, update = task.progress.roll_backs, task.progress.updates + 1
    if done >= most:
        raise NonFiniteError(
            f"{reason}; the run has rolled back {done} times already "
            f"(hooks.non_finite.most_roll_backs)"
        )
    saved = None
    if task.store is not None:
        task.wait_for_save()  # the newest may still be on its way
        store = task.store
        saved = chosen_by_primary(task, lambda: next(store.whole(), None))
    if saved is None:
        raise NonFiniteError(
            f"{reason}; and there is no checkpoint to roll back to: set run.dir, and "
            f"hooks.checkpoint.every_updates to one before update {update}"
        )
    task.leave_phase()
    task.drop_batches()
    spent, now = task.progress.seconds, _states(task)
    free = {
        name for name, hook in task.hooks.hooks.items() if hook.only_watches and not hook.files()
    }
    state = contents.restore(task, saved)
    there = {**state["hooks"], **_of_steps(state["steps"])}
    _check_states({name: own for name, own in now.items() if name not in free}, there)
    task.hooks.load_state_dict(state["hooks"])
    task.resumed_from = str(saved.path)
    task.progress.roll_backs = done + 1
    task.progress.seconds = spent  # that time is gone
    task.hooks.on_resume(task)
    contents.restore_random(task, state)
    log.warning(
        "rolled back from update %d to %s, and on with another order of the data: %s",
        update, saved.path.name, reason, extra=ALIKE,
    )  # fmt: skip
    task.recorder.later(
        "roll_back", update=update, to=task.progress.updates, number=done + 1, reason=reason
    )


def _states(task: Task) -> dict[str, Any]:
    """The states that there are, of hooks and steps."""
    steps = [contents.state_of(step) for step, _ in task.stages.steps]
    return {**task.hooks.state_dict(), **_of_steps(steps)}


def _of_steps(states: Sequence[Any]) -> dict[str, Any]:
    return {f"train step {number}": state for number, state in enumerate(states) if state}


def _check_states(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """A new process would begin without a state; in this one it cannot be taken away."""
    for name in now:
        if name not in then:
            raise PhaseloopError(
                f"{name} has a state now and had none at the checkpoint, so it cannot be "
                f"rolled back; let its state_dict have the same keys from the start"
            )
