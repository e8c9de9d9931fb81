"""Hook ``teacher``: a part of the model follows the rest of it slowly, and is not trained."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError, listing
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.freezing import Matched
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shards import local
from phaseloop.engine.task import Task

_SCHEDULES = ("cosine", "constant")


@register_hook("teacher")
class Teacher(Hook):
    """After every update, teacher = m * teacher + (1 - m) * student.

    The teacher is a module of the model; each of its parameters, ``teacher.NAME``, follows the
    model's ``NAME``, and is frozen in every stage. At the start of a run it is a copy; so are its
    buffers, which then go their own way: a batch norm in it keeps statistics of what the teacher
    sees. What it is, it is as a part of the model: checkpoints have it.

    With ``cosine``, m = 1 - (1 - momentum) * (1 + cos(pi * where)) / 2 rises from ``momentum``
    towards 1 over the stage, with where = (k - 1) / N at update k of N (Grill et al., "Bootstrap
    your own latent", NeurIPS 2020, 3.2, where k begins with 0); with ``constant`` it stays (He et
    al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020, equation
    2). A skipped update moves nothing.

    Args:
        module: name of the teacher in the model.
        momentum: m at the start, 0 to 1.
        schedule: ``cosine`` or ``constant``.

    Raises:
        ConfigError: a number is out of range, or there is no such schedule. At the start: there is
            no such module, a parameter has none of its name and shape to follow, or nothing is left
            to train.
    """

    # Before averages are taken of the model, and before it is saved.
    order = Order.DEFAULT

    def __init__(
        self, module: str = "teacher", momentum: float = 0.996, schedule: str = "cosine"
    ) -> None:
        self.module = module
        self.momentum = momentum
        self.schedule = schedule
        self._teacher: list[Tensor] = []
        self._student: list[Tensor] = []

    def on_start(self, task: Task) -> None:
        self._check(task)
        there = dict(task.bare_model.named_parameters())
        followers = self._followers(there)
        self._hold(task, followers)
        self._teacher = [local(there[name].detach()) for name in followers]
        self._student = [local(there[name].detach()) for name in followers.values()]
        if not task.resumed:
            torch._foreach_copy_(self._teacher, self._student)
            buffers = dict(task.bare_model.named_buffers())
            for name, followed in self._followers(buffers).items():
                buffers[name].copy_(buffers[followed])

    def _hold(self, task: Task, followers: Mapping[str, str]) -> None:
        """Freeze them for good; not their batch norms, which go on seeing what the teacher sees."""
        held = Matched(frozenset(followers), frozenset())
        if task.optimizers:
            task.freezing.check_left(task.trainable, held, f"hooks.{self.name}.module")
        task.freezing.hold(f"hooks.{self.name}", held)

    def on_step(self, task: Task) -> None:
        # Not at on_update: an update of several optimizers, or of several chunks, has several.
        if task.updated:
            moved = 1 - self.momentum_at(self._where(task))
            torch._foreach_lerp_(self._teacher, self._student, moved)

    def _where(self, task: Task) -> float:
        """Position in the stage before the update that was just made, which is counted by now."""
        plan = task.plan
        return (plan.updates_done(task.progress) - 1) / plan.updates if plan.updates else 0.0

    def momentum_at(self, where: float) -> float:
        """m at this position in the stage, 0 to 1."""
        if self.schedule == "constant":
            return self.momentum
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * where)) / 2

    def _check(self, task: Task) -> None:
        key = f"hooks.{self.name}"
        if not 0 <= self.momentum <= 1:
            raise ConfigError(f"{key}.momentum", f"{self.momentum} is not from 0 to 1")
        if self.schedule not in _SCHEDULES:
            raise ConfigError(
                f"{key}.schedule", f"{self.schedule!r} is not one of {', '.join(_SCHEDULES)}"
            )
        modules = [name for name, _ in task.bare_model.named_modules()]
        if self.module not in modules or not self.module:
            names = listing(name for name in modules if name and "." not in name)
            raise ConfigError(
                f"{key}.module",
                f"{type(task.bare_model).__name__} has no module {self.module!r}; it has {names}",
            )
        if self.schedule == "cosine" and any(p.endless for p in task.stages.plans()):
            raise ConfigError(
                f"{key}.schedule",
                "cosine rises over the length of the run, and nobody knows it; use constant",
            )

    def _followers(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The name of each tensor of the teacher, and of the one that it follows."""
        found = {}
        for name, tensor in tensors.items():
            if name.startswith(f"{self.module}."):
                followed = name.removeprefix(f"{self.module}.")
                if followed not in tensors or tensors[followed].shape != tensor.shape:
                    raise ConfigError(
                        f"hooks.{self.name}.module",
                        f"{name} has nothing to follow: the model has no {followed} of shape "
                        f"{list(tensor.shape)}",
                    )
                found[name] = followed
        return found
