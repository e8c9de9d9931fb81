"""A window's start: what a step may change, put aside there and back before the window is redone.

So a broken attempt leaves no trace. Parameters and optimizers are not put aside, since they move
last; where they have moved all the same, the window cannot be redone, and that is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from phaseloop.engine import rng
from phaseloop.engine.gradients import clear
from phaseloop.engine.trees import copied

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class WindowStart:
    """What was put aside at the start of the window at hand, of a train phase or a test.

    Meters, scalars not yet logged, buffers of model and criterion, the train step's state,
    ``carry``, all generators, the count of steps. Not hooks: what they have counted, they have.
    And what a hook or step has asked for, such as a stop, stays asked for.

    Args:
        task: built, its optimizers made.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        criterion = task.criterion_module
        roots = [task.bare_model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        self._parameters = [p for root in roots for p in root.parameters()]
        self._versions: list[int] = []
        self._buffers = _Buffers(roots)
        self._begun = _Begun(task.optimizers.values())
        self._kept: dict[str, Any] = {}

    def let_go(self) -> None:
        """Watch the optimizers no longer, and forget what was put aside."""
        self._begun.let_go()
        self._kept = {}

    def put_aside(self) -> None:
        """Copy everything; called when a window begins."""
        task = self._task
        self._begun.forget()
        self._versions = [p._version for p in self._parameters]
        self._buffers.put_aside()
        self._kept = {
            "meters": task.meters.put_aside(),
            "recorder": task.recorder.put_aside(),
            "step": self._step_state(),
            "carry": copied(task.carry),
            "steps": task.progress.steps,
            "host": rng.HostGenerators(),
            "device": task.backend.rng_state(),
        }

    def why_not(self) -> str:
        """Why the window cannot be redone; empty: it can."""
        changed = self._versions != [p._version for p in self._parameters]
        if self._task.moved:
            names = ", ".join(sorted(self._task.moved))
            return f"the update cannot be redone, since {names} has already stepped in it"
        if self._begun and (changed or self._begun.moved()):
            return "the update cannot be redone, since an optimizer was in the middle of its step"
        if changed:
            return "the update cannot be redone, since the step itself has changed parameters"
        return ""

    def put_back(self) -> None:
        """Make everything as it was when the window began, without gradients."""
        task, kept = self._task, self._kept
        clear(self._parameters)
        self._begun.take_back()
        if task.precision.scaler is not None:
            task.precision.scaler.forget()
        self._buffers.put_back()
        # Copied once more, for a second attempt may break off too.
        task.meters.put_back(kept["meters"])
        task.recorder.put_back(kept["recorder"])
        task.shown.drop()
        if kept["step"]:
            self._step().load_state_dict(copied(kept["step"]))
        task.carry = copied(kept["carry"])
        task.progress.steps = kept["steps"]
        kept["host"].put_back()
        task.backend.set_rng_state(kept["device"])

    def _step(self) -> Any:
        return self._task.stages.steps[self._task.progress.stage][0]

    def _step_state(self) -> Any:
        step = self._step()
        methods = ("state_dict", "load_state_dict")
        has_state = all(callable(getattr(step, name, None)) for name in methods)
        return copied(step.state_dict()) if has_state else None


class _Begun:
    """Which optimizers have begun to step in the window, and what they kept just before.

    A step may run out of memory while it makes its state, before anything has moved: what is new
    can be taken away again.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._marks: list[tuple[Optimizer, dict[Tensor, list[Any]]]] = []
        self._handles = [o.register_step_pre_hook(self._note) for o in optimizers]

    def __bool__(self) -> bool:
        return bool(self._marks)

    def let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        self._marks = []

    def moved(self) -> bool:
        """Something that an optimizer kept already has changed."""
        return any(
            marks != _marks(optimizer.state[p])
            for optimizer, before in self._marks
            for p, marks in before.items()
        )

    def take_back(self) -> None:
        """Remove what is new."""
        for optimizer, before in self._marks:
            for p in [p for p in optimizer.state if p not in before]:
                del optimizer.state[p]
        self._marks = []

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if all(known is not optimizer for known, _ in self._marks):
            before = {p: _marks(state) for p, state in optimizer.state.items()}
            self._marks.append((optimizer, before))


class _Buffers:
    """Copies of all buffers of some modules; one that a module has replaced comes back too."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._owners = [module._buffers for root in roots for module in root.modules()]
        self._ids: list[int] | None = None
        self._shapes: list[torch.Size] = []
        self._were: list[dict[str, Tensor | None]] = []
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def put_aside(self) -> None:
        # Usually the same tensors as at the window before: then there are only values to copy.
        ids = [id(b) for owner in self._owners for b in owner.values()]
        if ids != self._ids or self._shapes != [b.shape for b in self._originals]:
            self._find(ids)
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def _find(self, ids: list[int]) -> None:
        self._ids = ids
        self._were = [dict(owner) for owner in self._owners]
        found = {id(b): b for were in self._were for b in were.values() if _writable(b)}
        self._originals = [b for b in found.values() if b is not None]
        self._shapes = [b.shape for b in self._originals]
        self._copies = [torch.empty_like(b) for b in self._originals]

    @torch.no_grad()
    def put_back(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._originals, self._copies)
        for owner, were in zip(self._owners, self._were, strict=True):
            owner.clear()
            owner.update(were)


def _writable(buffer: Tensor | None) -> bool:
    """Not one that is not made yet, nor one whose elements share memory, as ``expand`` makes."""
    if buffer is None or is_lazy(buffer):
        return False
    return all(
        stride > 0 or size < 2 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _marks(state: Any) -> list[Any]:
    """What changes when an entry of an optimizer's state does."""
    if not isinstance(state, dict):
        return [id(state)]
    return [
        (name, value._version) if isinstance(value, Tensor) else (name, id(value))
        for name, value in state.items()
    ]
