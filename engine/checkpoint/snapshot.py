"""Snapshot: a copy of the state that nobody changes while it is written.

The memory is kept from one save to the next: there is one copy of the state on the host, as large
as what a checkpoint holds, and no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from phaseloop.engine.device_kinds import kind_of

Place = tuple[Any, ...]
"""Where a tensor stands in the tree: its keys from the root on."""

_Kind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str]


class Snapshot:
    """Copies trees into buffers that it keeps.

    A tensor that stands where one of its shape, strides and type stood in the tree before goes
    into that one's buffer: copying into memory that is in use already takes a fifth of the time.
    Buffers of what is not in the tree any more are let go.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, tuple[_Kind, Tensor]] = {}

    @torch.no_grad()
    def take(self, tree: Any, own: Collection[int] = ()) -> Any:
        """A copy of dicts, lists, tuples, sets, tensors and plain Python, on the CPU.

        It is good until the next call. What is one object in the tree is one in the copy, and
        tensors that are one piece of memory (tied weights) stay so. A part of a larger piece of
        memory is copied alone. The host waits for the device once.

        Args:
            own: ``id`` of tensors on the CPU that nothing changes: they are taken as they are.
        """
        kept, self._kept = self._kept, {}
        targets: list[Tensor] = []
        sources: list[Tensor] = []

        def copy(tensor: Tensor, place: Place) -> Tensor:
            if id(tensor) in own:
                return tensor
            kind = _kind(tensor)
            before, buffer = kept.pop(place, (None, None))
            if buffer is None or before != kind:
                buffer = _buffer_for(tensor)
            self._kept[place] = kind, buffer
            targets.append(buffer)
            sources.append(tensor.detach())
            return buffer.detach()  # what the reader is given has flags of its own

        copied = _Walk(copy).tree(tree, ())
        kept.clear()  # before the copying: memory that is let go is not needed beside it
        if targets:
            # On a GPU the buffers are pinned, and the copies of all of them run at once.
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in {source.device for source in sources if source.device.type != "cpu"}:
            kind_of(device).wait(device)
        return copied


@torch.no_grad()
def compact(tree: Any) -> Any:
    """The tree as :meth:`Snapshot.take` gives it, without a copy of what can be written as it is.

    Copied is only what lies on another device, or is a part of a larger piece of memory.
    """

    def copy(tensor: Tensor, _: Place) -> Tensor:
        whole = tensor.device.type == "cpu" and _is_whole(tensor)
        return tensor.detach() if whole else _buffer_for(tensor).copy_(tensor)

    return _Walk(copy).tree(tree, ())


class _Walk:
    """One way through a tree.

    Args:
        copy: gives the copy of a tensor that was not met before.
    """

    def __init__(self, copy: Callable[[Tensor, Place], Tensor]) -> None:
        self._copy = copy
        self._objects: dict[int, Any] = {}
        self._memory: dict[Place, Tensor] = {}

    def tree(self, value: Any, place: Place) -> Any:
        """The copy of ``value``; what cannot be changed is itself."""
        if not isinstance(value, (dict, list, tuple, set, Tensor)):
            return value
        known = self._objects.get(id(value))
        if known is None:
            known = self._objects[id(value)] = self._new(value, place)
        return known

    def _new(self, value: Any, place: Place) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, dict):
            return self._dict(value, place)
        if isinstance(value, set):
            return {self.tree(item, (*place, number)) for number, item in enumerate(value)}
        items = [self.tree(item, (*place, number)) for number, item in enumerate(value)]
        if isinstance(value, list):
            return items
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return tuple(items) if changed else value

    def _dict(self, value: dict[Any, Any], place: Place) -> dict[Any, Any]:
        items = {key: self.tree(item, (*place, key)) for key, item in value.items()}
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        # A module's state_dict has its versions there, as an attribute.
        for name, item in vars(value).items():
            setattr(ordered, name, self.tree(item, (*place, name)))
        return ordered

    def _tensor(self, tensor: Tensor, place: Place) -> Tensor:
        if tensor.layout != torch.strided:
            copied = tensor.detach().to("cpu", copy=True)
        else:
            # Of one storage and seen in one way: tied.
            seen = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.is_conj(),
                    tensor.is_neg(), *_kind(tensor))  # fmt: skip
            if seen in self._memory:
                copied = self._memory[seen].detach()
            else:
                copied = self._memory[seen] = self._copy(tensor, place)
        copied.requires_grad_(tensor.requires_grad)
        return nn.Parameter(copied, tensor.requires_grad) if _is_parameter(tensor) else copied


def _kind(tensor: Tensor) -> _Kind:
    """Tensors of one kind can be copied into one buffer."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type


def _is_parameter(tensor: Tensor) -> bool:
    return type(tensor) is nn.Parameter


def _is_whole(tensor: Tensor) -> bool:
    """All of its memory is its own, in the order in which a copy would have it."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    size = tensor.numel() * tensor.element_size()
    alone = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size
    return alone and _like(tensor, device="meta").stride() == tensor.stride()


def _buffer_for(tensor: Tensor) -> Tensor:
    """Memory on the CPU, pinned where that lets a GPU copy into it without a wait."""
    if tensor.device.type == "cpu":
        return _like(tensor)
    return _like(tensor, device="cpu", pin_memory=kind_of(tensor.device).pins)


def _like(tensor: Tensor, **options: Any) -> Tensor:
    return torch.empty_like(tensor.detach(), memory_format=torch.preserve_format, **options)
