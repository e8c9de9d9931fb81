"""Moving a batch of any shape to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``data`` with every tensor in it on ``device``; everything else is passed through.

    Goes through mappings, lists, tuples, named tuples, dataclasses and packed sequences. Another
    type that has a ``to(device)`` method of its own is moved by it.
    """
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, PackedSequence):
        return data.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
    if isinstance(data, Mapping):
        moved = {k: to_device(v, device, non_blocking) for k, v in data.items()}
        if type(data) is dict:
            return moved
        if isinstance(data, MutableMapping):
            # Copied, since a type of its own may hold more than its items: a default, say.
            data = copy.copy(data)
            data.update(moved)
            return data
        return type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(v, device, non_blocking) for v in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(v, device, non_blocking) for v in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changes = {
            f.name: to_device(getattr(data, f.name), device, non_blocking)
            for f in dataclasses.fields(data)
            if f.init
        }
        return dataclasses.replace(data, **changes)
    if callable(getattr(data, "to", None)):
        return data.to(device)
    return data
