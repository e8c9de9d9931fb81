"""Hook ``non_finite``: what happens when a loss, gradient or weight is NaN or infinite."""

from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError, NonFiniteError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("non_finite", default=True)
class NonFinite(Hook):
    """Watches losses and gradients.

    ``stop`` adds up zeros times the loss and the clipped norm on the device: the sum is NaN once
    one of them was not finite. It is read at log points, phase ends and before every save, where
    the weights are checked too; between them nothing waits for the device. ``skip`` leaves out an
    update whose gradients are not finite; it has to read one flag from the device per update.

    Args:
        policy: ``stop`` or ``skip``.

    Raises:
        ConfigError: another policy.
    """

    order = Order.FINITE

    def __init__(self, policy: str = "stop") -> None:
        if policy not in ("stop", "skip"):
            raise ConfigError("hooks.non_finite.policy", f"{policy!r} is not 'stop' or 'skip'")
        self.policy = policy
        self._seen: Tensor | None = None

    def on_start(self, task: Task) -> None:
        # A checkpoint of weights that are not finite could only be resumed to fail again.
        task.before_save.append(self._judge)

    def on_gradients(self, task: Task) -> None:
        if self.policy == "skip":
            # Here the host waits for the device.
            if not bool(_all_finite([p.grad for p in task.trainable if p.grad is not None])):
                task.skip_update("a gradient is not finite")
        elif task.loss is not None:
            self._watch(task.loss.detach())

    def on_update(self, task: Task) -> None:
        if self.policy == "stop" and task.gradient_norm is not None:
            self._watch(task.gradient_norm)

    def on_step(self, task: Task) -> None:
        if task.recorder.due:
            self._judge(task)

    def on_phase_end(self, task: Task) -> None:
        self._judge(task)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._seen is None else {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state.get("seen")

    def _watch(self, value: Tensor) -> None:
        zero = value * 0
        self._seen = zero if self._seen is None else self._seen + zero

    def _judge(self, task: Task) -> None:
        """Here the host waits for the device."""
        seen, self._seen = self._seen, None
        update = task.progress.updates
        if seen is not None and not bool(torch.isfinite(seen)):
            raise NonFiniteError(
                f"a loss or gradient up to update {update} is not finite; lower the learning "
                f"rate, clip gradients (gradients.clip_norm), or set hooks.non_finite.policy=skip"
            )
        if not bool(_all_finite(list(task.bare_model.parameters()))):
            names = [n for n, p in task.bare_model.named_parameters() if not p.isfinite().all()]
            raise NonFiniteError(f"weights are not finite at update {update}: {', '.join(names)}")


def _all_finite(tensors: list[Tensor]) -> Tensor:
    """One flag on the device: True when every element of every tensor is finite."""
    tensors = [t for t in tensors if t.numel() and t.is_floating_point()]
    if not tensors:
        return torch.tensor(True)
    return torch.stack(torch._foreach_norm(tensors, float("inf"))).isfinite().all()
