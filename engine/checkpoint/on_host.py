"""On the host: the tensors of a lazy device, fetched all at once before a checkpoint is made.

They are copies, which nothing changes, and can be read where there is no such device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phaseloop.engine.trees import map_tensors

if TYPE_CHECKING:
    from phaseloop.engine.backends.base import Backend


def fetched(tree: Any, backend: Backend, made: set[int] | None = None) -> Any:
    """The tree with every tensor on the CPU, where the device is lazy; else the same object.

    What is one object in the tree (tied weights) is one in the result, parameters are parameters.

    Args:
        made: filled with the ``id`` of every tensor that is new: nobody else changes it.
    """
    if not backend.lazy:
        return tree
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            found[id(tensor)] = tensor
        return tensor

    _map(note, tree)
    values = backend.to_host([tensor.detach() for tensor in found.values()])
    copies = {key: _like(t, v) for (key, t), v in zip(found.items(), values, strict=True)}
    if made is not None:
        made.update(map(id, copies.values()))
    return _map(lambda tensor: copies.get(id(tensor), tensor), tree)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if type(tensor) is nn.Parameter:
        return nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _map(function: Any, tree: Any) -> Any:
    def other(value: Any) -> Any:  # a set is none of the trees that batches come in
        return {_map(function, item) for item in value} if type(value) is set else value

    with torch.no_grad():
        return map_tensors(function, tree, other)
