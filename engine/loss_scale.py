"""Loss scale: losses in half precision are multiplied before backward, gradients divided after.

float16 has no numbers between 0 and 6e-8: small gradients would be lost. The scale falls when
gradients overflow, and rises again after a while without (Micikevicius et al., "Mixed precision
training", ICLR 2018). The arithmetic is torch's ``GradScaler``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.settings import LossScale


class Scaler:
    """The loss scale of one training.

    Attributes:
        last_scale: the scale that the last overflow was found at.
    """

    def __init__(self, device: torch.device, settings: LossScale) -> None:
        self._scaler = _TorchScaler(
            device.type,
            init_scale=settings.initial,
            growth_factor=settings.growth,
            backoff_factor=settings.backoff,
            growth_interval=settings.growth_interval,
        )
        self._unscaled: set[str] = set()
        self.last_scale = settings.initial

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as backward has to see it."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizers: Mapping[str, Optimizer], backend: Backend) -> tuple[str, ...]:
        """Divide the gradients of these optimizers; the names of those that overflowed.

        What overflowed on one process has done so on all. Here the host waits for the device: one
        flag for each optimizer.
        """
        overflowed = []
        for name, optimizer in optimizers.items():
            if not _has_gradients(optimizer):
                continue
            self._unscaled.add(name)
            if any(float(flag) for flag in self._scaler.unscale_again(optimizer, backend)):
                overflowed.append(name)
        if overflowed:
            self.last_scale = self._scaler.get_scale()
        return tuple(overflowed)

    def update(self) -> None:
        """Let the scale fall or rise, once per update, by what was found at ``unscale``."""
        if self._unscaled:
            self._scaler.update()
            self._unscaled.clear()

    def forget(self) -> None:
        """What was found at ``unscale`` counts for nothing: the gradients are made again."""
        self._scaler.forget()
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale and the count of updates without overflow."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse."""
        self._scaler.load_state_dict(state)


class _TorchScaler(GradScaler):
    """torch's scaler, for optimizers that step several times between two updates of the scale.

    What it finds it keeps to itself; asking it costs no second look at the gradients.
    """

    def unscale_again(self, optimizer: Optimizer, backend: Backend) -> list[Tensor]:
        """Unscale; a flag for each device that holds gradients: 1 after an overflow.

        The scale's update sees what was found at all steps since the last one.
        """
        before = self._per_optimizer_states.pop(id(optimizer), {}).get("found_inf_per_device", {})
        self.unscale_(optimizer)
        found = self._found_inf_per_device(optimizer)
        if backend.world_size > 1:
            for flag in found.values():
                backend.all_reduce(flag)
        flags = [flag.clone() for flag in found.values()]
        for device, flag in before.items():
            found[device] = found[device] + flag if device in found else flag
        return flags

    def forget(self) -> None:
        """As ``update`` leaves it, with the scale as it is."""
        self._per_optimizer_states.clear()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
