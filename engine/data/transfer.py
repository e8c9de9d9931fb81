"""Moving a batch of any shape to the device, and to double precision."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``data`` with every tensor in it on ``device``; everything else is passed through.

    Goes through mappings, lists, tuples, named tuples, dataclasses and packed sequences. Another
    type that has a ``to(device)`` method of its own is moved by it.
    """

    def move(value: Any) -> Any:
        if isinstance(value, (Tensor, PackedSequence)):
            return value.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return map_leaves(move, data)


def to_double(data: Any) -> Any:
    """``data`` with every floating-point tensor in it in double precision; goes as far as
    :func:`to_device`, but for types with a ``to(device)`` method of their own."""

    def widen(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value.double() if value.data.is_floating_point() else value
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return map_leaves(widen, data)


def map_leaves(change: Callable[[Any], Any], data: Any) -> Any:
    """``data`` with ``change`` made to everything in it that is no container known here."""
    if isinstance(data, (Tensor, PackedSequence)):
        return change(data)
    if isinstance(data, Mapping):
        changed = {k: map_leaves(change, v) for k, v in data.items()}
        if type(data) is dict:
            return changed
        if isinstance(data, MutableMapping):
            # Copied, since a type of its own may hold more than its items: a default, say.
            data = copy.copy(data)
            data.update(changed)
            return data
        return type(data)(changed)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(change, v) for v in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_leaves(change, v) for v in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changes = {
            f.name: map_leaves(change, getattr(data, f.name))
            for f in dataclasses.fields(data)
            if f.init
        }
        return dataclasses.replace(data, **changes)
    return change(data)
