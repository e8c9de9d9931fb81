"""Step facts: which train step a task runs, and what the step has declared about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.facts import name_of
from phaseloop.engine.registry import train_steps

Step = Callable[[Any], None]


@dataclass(frozen=True)
class StepFacts:
    """What the engine has to know of a step.

    Attributes:
        whole_model_forward: it calls the model as a whole, once per micro-batch.
        takes_window: it is called once per window and goes through ``task.window()``.
        one_piece: it cannot work on a batch that is cut into several micro-batches.
        across_samples: its loss looks at the samples of a pass together.
        name: as it is registered, or that of the function or class.
        check: ``check(task, step)`` says at the start what the step needs and the task has not.
    """

    whole_model_forward: bool = False
    takes_window: bool = False
    one_piece: bool = False
    across_samples: bool = False
    name: str = ""
    check: Callable[[Any, Step], None] | None = None


def resolve_step(step: str | Step) -> tuple[Step, StepFacts]:
    """The step to call, and its facts.

    A step that is not registered may declare them as attributes of the same names as the arguments
    of ``register_train_step``; its ``check`` is called with the task alone, as a method is.

    Raises:
        ConfigError: it is neither a registered name nor callable.
    """
    if isinstance(step, str):
        entry = train_steps.get(step)
        made = entry.target() if isinstance(entry.target, type) else entry.target
        return made, _facts(entry.declared, step)
    if not callable(step):
        raise ConfigError("train_step", f"{step!r} is neither a registered name nor callable")
    found = next((e for e in train_steps if _is_of(step, e.target)), None)
    if found is not None:
        exact = step is found.target or type(step) is found.target
        return step, _facts(found.declared, found.name if exact else str(name_of(step)))
    names = ("whole_model_forward", "takes", "one_piece", "across_samples")
    declared = {name: getattr(step, name) for name in names if hasattr(step, name)}
    return step, _facts(declared, str(name_of(step)))


def _is_of(step: Step, target: Any) -> bool:
    """The step is what was registered, or an object of its class or of one made from it."""
    return step is target or (isinstance(target, type) and isinstance(step, target))


def _facts(declared: Mapping[str, Any], name: str) -> StepFacts:
    takes = declared.get("takes", "micro_batch")
    if takes not in ("micro_batch", "window"):
        raise ConfigError("train_step", f"takes={takes!r} is not 'micro_batch' or 'window'")
    return StepFacts(
        whole_model_forward=bool(declared.get("whole_model_forward", False)),
        takes_window=takes == "window",
        one_piece=bool(declared.get("one_piece", False)),
        across_samples=bool(declared.get("across_samples", False)),
        name=name,
        check=declared.get("check"),
    )
