"""Trees: the tensors in a value of any nesting, mapped by a function."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, other: Callable[[Any], Any] | None = None
) -> Any:
    """``value`` with ``function`` of every tensor in it; everything else is passed through.

    Goes through mappings, lists, tuples, named tuples, dataclasses and packed sequences.

    Args:
        other: called with what is none of these, and gives what takes its place.
    """

    def inner(part: Any) -> Any:
        return map_tensors(function, part, other)

    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        # By its own constructor, which does not sort again; the batch sizes stay on the CPU.
        parts = (value.data, value.sorted_indices, value.unsorted_indices)
        data, order, back = (None if part is None else function(part) for part in parts)
        return PackedSequence(data, value.batch_sizes, order, back)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return with_items(value, {key: inner(part) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return like_tuple(value, [inner(part) for part in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: inner(getattr(value, name)) for name in fields})
    return value if other is None else other(value)


def copied(tree: Any) -> Any:
    """The same without shared memory; a tensor with a graph, which nothing writes to, stays."""
    return map_tensors(lambda t: t if t.requires_grad else t.clone(), tree, copy.deepcopy)


def like_tuple(value: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    """These parts as a list, tuple or named tuple of the type of ``value``."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of ``value``, with its items and these, which take their place."""
    if isinstance(value, MutableMapping):
        # Copied, since a type of its own may hold more than its items: a default, say.
        changed = copy.copy(value)
        changed.update(items)
        return changed
    return type(value)({**value, **items})  # type: ignore[call-arg]
