"""Precision: the number type that a forward pass is computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from phaseloop.engine.data.transfer import to_double
from phaseloop.engine.errors import ConfigError

ALLOWED = ("float32", "bfloat16", "float64")


class Precision:
    """How the model computes.

    ``float32``: as it is. ``bfloat16``: torch's autocast around the forward pass; parameters,
    loss and meters stay in float32. ``float64``: the model and all floating-point input in
    double precision, for comparing mathematics.

    Args:
        name: one of the three.

    Raises:
        ConfigError: another name.
    """

    def __init__(self, name: str) -> None:
        if name not in ALLOWED:
            raise ConfigError("precision", f"{name!r} is not one of {', '.join(ALLOWED)}")
        self.name = name
        self.changes_forward = name == "bfloat16"
        self.changes_input = name == "float64"

    def prepare(self, module: torch.nn.Module) -> None:
        """Convert the parameters, in place, where the precision asks for it."""
        if self.name == "float64":
            module.double()

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.name == "bfloat16")

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
