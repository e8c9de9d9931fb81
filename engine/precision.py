"""Precision: the number type that a forward pass is computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from phaseloop.engine.data.transfer import to_double
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.loss_scale import Scaler
from phaseloop.engine.settings import LossScale

ALLOWED = ("float32", "bfloat16", "float16", "float64")

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Precision:
    """How the model computes.

    ``float32``: as it is. ``bfloat16``, ``float16``: torch's autocast around the forward pass;
    parameters, loss and meters stay in float32. ``float16`` has a small range, so its losses are
    scaled before backward and its gradients back after it. ``float64``: the model and all
    floating-point input in double precision, for comparing mathematics.

    Args:
        name: one of the four.
        loss_scale: how losses are scaled; only with ``float16``.

    Raises:
        ConfigError: another name, or a loss scale with another precision.
    """

    name: str = "float32"
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        if self.name not in ALLOWED:
            raise ConfigError("precision", f"{self.name!r} is not one of {', '.join(ALLOWED)}")
        if self.loss_scale is not None and self.name != "float16":
            raise ConfigError(
                "precision.loss_scale", f"only float16 needs it; the precision is {self.name}"
            )
        if self.loss_scale is not None:
            self.loss_scale.check("precision.loss_scale")
        self.changes_forward = self.name in _AUTOCAST
        self.changes_input = self.name == "float64"
        self.scaler: Scaler | None = None

    def prepare(self, module: torch.nn.Module) -> None:
        """Convert the parameters, in place, where the precision asks for it."""
        if self.name == "float64":
            module.double()

    def start(self, device: torch.device) -> None:
        """Make the loss scaler, where the precision needs one."""
        if self.name == "float16":
            self.scaler = Scaler(device, self.loss_scale or LossScale())

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return torch.autocast(
            device.type, dtype=_AUTOCAST.get(self.name), enabled=self.changes_forward
        )

    def cast_input(self, data: Any) -> Any:
        """Floating-point tensors in ``data`` as the model expects them."""
        return to_double(data) if self.name == "float64" else data

    @staticmethod
    def widen(output: Any) -> Any:
        """``output`` with every half-precision tensor in float32: losses are computed there."""
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t,
            output,
        )
