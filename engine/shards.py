"""Shards: tensors of which each process holds a part, whole on the way out and cut on the way in.

Such a tensor is a ``DTensor`` of torch; its shape is that of the whole. Where none is sharded,
everything here gives back what it was given. The module is told by its name and not imported:
that takes longer than all of the engine.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

CALLED_A_PART = (
    "with backend fsdp a step calls the model as a whole, or parts of it that are gathered by "
    "themselves: name the part in backend.shard"
)

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


def is_shard(value: Any) -> bool:
    """Whether this process may hold a part of it only."""
    return hasattr(value, "full_tensor")


def class_name(module: Any) -> str:
    """The class that a module was made from; FSDP puts one of its own before it."""
    kind, *others = type(module).__mro__
    of_fsdp = others[0].__name__ == "FSDPModule"
    return (others[1] if of_fsdp else kind).__name__


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in the same memory, without a graph."""
    if not is_shard(tensor):
        return tensor
    part: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part.detach()


def whole(tree: Any, keep: bool, made: set[int] | None = None) -> Any:
    """A tree with every sharded tensor whole, on the CPU; all processes have to call it.

    One tensor after the other is gathered, so that a device has to hold one of them beside what
    it has. What is one piece of memory (tied weights) stays so.

    Args:
        tree: dicts, lists, tuples, and anything else; the same on all processes.
        keep: this process wants them; elsewhere None takes their place.
        made: filled with the ``id`` of every tensor that is new: nobody else changes it.
    """
    return _Whole(keep, set() if made is None else made).tree(tree)


class _Whole:
    """One way through a tree."""

    def __init__(self, keep: bool, made: set[int]) -> None:
        self._keep = keep
        self._made = made
        self._gathered: dict[Any, Tensor | None] = {}
        self._alive: list[Tensor] = []  # else memory is used again, and looks like the same

    def tree(self, value: Any) -> Any:
        """The same object where nothing in it is sharded."""
        if isinstance(value, dict):
            return self._dict(value)
        if type(value) in (list, tuple):
            items = [self.tree(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(items)
        return self._tensor(value) if is_shard(value) else value

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        items = {key: self.tree(item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        return _like(value, items)

    def _tensor(self, tensor: Any) -> Tensor | None:
        part = tensor._local_tensor
        seen = (part.untyped_storage()._cdata, part.storage_offset(), tensor.shape, tensor.dtype)
        if seen not in self._gathered:
            self._alive.append(part)
            # torch 2.9 cannot gather what has no elements.
            some = tensor.numel() > 0
            gathered = tensor.detach().full_tensor() if some else part.new_empty(tensor.shape)
            self._gathered[seen] = self._copied(gathered, part) if self._keep else None
        return self._gathered[seen]

    def _copied(self, gathered: Tensor, part: Tensor) -> Tensor:
        """On the CPU, in memory of its own and no more of it."""
        copied = gathered.cpu()
        storage = copied.untyped_storage()
        if storage.nbytes() > copied.nbytes or storage.data_ptr() == part.data_ptr():
            copied = copied.clone()
        self._made.add(id(copied))
        return copied


def share_of(value: Any, like: Any) -> Any:
    """This process's part of a whole tensor, cut as ``like`` is; without communication.

    Args:
        value: whole, the same on all processes; or anything else, which stays as it is.
        like: a tensor of the same shape; where it is not sharded, ``value`` stays whole.
    """
    if not is_shard(like) or not isinstance(value, Tensor) or is_shard(value):
        return value
    if value.shape != like.shape:
        return value
    if not value.numel():  # torch cuts what has no elements in another way
        return like.detach().to(value.dtype).clone()
    from torch.distributed.tensor import DTensor

    mesh, part = like.device_mesh, value.detach()
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            part = _piece(part, placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
    return DTensor.from_local(
        # A copy: a view would keep the memory of the whole.
        part.to(like.device, copy=True).contiguous(),
        mesh,
        like.placements,
        run_check=False,
        shape=value.shape,
        stride=like.stride(),
    )


def shares_of(values: dict[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`share_of` for what two mappings have by the same name."""
    if not any(map(is_shard, like.values())):
        return values
    shares = {name: share_of(value, like.get(name)) for name, value in values.items()}
    return _like(values, shares)


def _like(given: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """``items`` as a dictionary of the same kind."""
    if not isinstance(given, OrderedDict):
        return items
    ordered = OrderedDict(items)
    vars(ordered).update(vars(given))  # a module's state_dict has its versions there
    return ordered


def _piece(tensor: Tensor, axis: int, count: int, number: int) -> Tensor:
    """As ``torch.chunk`` cuts; the last pieces may be smaller, or empty."""
    length = tensor.shape[axis]
    size = -(-length // count)
    start = min(number * size, length)
    return tensor.narrow(axis, start, min(size, length - start))


# --- norms ---


def norms(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of each whole tensor, in one ordinary tensor: [number of tensors].

    With sharded tensors all processes have to call it, and there is one reduction for all.

    Args:
        tensors: at least one, on one device.
    """
    parts = [local(t) for t in tensors]
    # A largest element of none would be an error.
    parts = [part if part.numel() else part.new_zeros(1) for part in parts]
    each = torch.stack(torch._foreach_norm(parts, p))
    if p == float("inf") and _loses_nan(each):
        each = torch.where(torch.stack([part.isnan().any() for part in parts]), float("nan"), each)
    first = next((t for t in tensors if is_shard(t)), None)
    return (
        each if first is None else _over_processes(each, [is_shard(t) for t in tensors], first, p)
    )


def _loses_nan(tensor: Tensor) -> bool:
    """On XLA the largest of some numbers is that of the others where one is NaN, and so are bounds.

    torch's own devices give NaN.
    """
    return tensor.device.type == "xla"


def _over_processes(each: Tensor, sharded: Sequence[bool], first: Any, p: float) -> Tensor:
    """Norms of wholes, from those of the parts."""
    group = first.device_mesh.get_group()
    reduce = torch.distributed.all_reduce
    mask = _mask(tuple(sharded), each.device)
    if p == float("inf"):
        # A NaN may be lost in a maximum.
        both = torch.stack([each.nan_to_num(posinf=float("inf")), each.isnan().to(each.dtype)])
        reduce(both, torch.distributed.ReduceOp.MAX, group=group)
        return torch.where(mask, torch.where(both[1] > 0, float("nan"), both[0]), each)
    # Squares of what float16 can hold it cannot.
    powers = each.to(torch.promote_types(each.dtype, torch.float32)) ** p
    reduce(powers, group=group)
    return torch.where(mask, (powers ** (1 / p)).to(each.dtype), each)


@functools.lru_cache(maxsize=8)
def _mask(sharded: tuple[bool, ...], device: torch.device) -> Tensor:
    """Kept, since the device would be waited for at every copy to it."""
    return torch.tensor(sharded, device=device)


def clip_norm(parameters: Iterable[Parameter], most: float, p: float) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``; the norm is an ordinary tensor, and everywhere."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = norms([norms(gradients, p)], p)[0]
    factor = torch.clamp(most / (norm + _EPSILON), max=1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm


def clip_value(parameters: Iterable[Parameter], most: float) -> None:
    """As ``torch.nn.utils.clip_grad_value_``."""
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    if _loses_nan(parts[0]):
        for part in parts:
            part.copy_(torch.where(part.isnan(), part, part.clamp(-most, most)))
        return
    torch._foreach_clamp_min_(parts, -most)
    torch._foreach_clamp_max_(parts, most)
