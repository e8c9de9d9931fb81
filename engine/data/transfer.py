"""Moving a batch of any shape to the device, and to double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.trees import map_tensors


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``data`` with every tensor in it on ``device``; everything else is passed through.

    Goes through mappings, lists, tuples, named tuples, dataclasses and packed sequences. Another
    type that has a ``to(device)`` method of its own is moved by it.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    def move_other(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return map_tensors(move, data, move_other)


def to_double(data: Any) -> Any:
    """``data`` with every floating-point tensor in it in double precision; goes as far as
    :func:`to_device`, but for types with a ``to(device)`` method of their own."""
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, data)
