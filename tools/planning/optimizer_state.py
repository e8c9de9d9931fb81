"""How much an optimizer keeps: counted by a step of a copy of it, whose tensors have no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from phaseloop.engine import rng

Shape = Callable[[Tensor], Sequence[int]]

_ON_THE_DEVICE = ("fused", "foreach", "capturable")
"""Ways of computing that tensors without memory do not have; what is kept is the same."""


_FEW = 1 << 24
"""So many numbers may be computed with, where a step cannot be made without."""


def state_bytes(optimizer: Optimizer, shape: Shape = lambda tensor: tensor.shape) -> int | None:
    """Bytes of all tensors that the optimizer has after its first update.

    Args:
        optimizer: left as it is. Parameters with ``requires_grad`` are those that get a gradient.
        shape: what this process has of a tensor.

    Returns:
        None where a step cannot be made: one that asks for a closure; or, of a large model, one
        that looks at values.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    few = sum(parameter.numel() for parameter in parameters) <= _FEW
    for device in ("meta", "cpu") if few else ("meta",):
        try:
            with rng.aside(0):
                imitation = _imitation(optimizer, shape, device)
                imitation.step()
        except Exception:
            continue
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(imitation))
    return None


def _imitation(optimizer: Optimizer, shape: Shape, device: str) -> Optimizer:
    """A copy of it, on parameters and gradients of zeros."""

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(tuple(shape(tensor)), dtype=tensor.dtype, device=device)

    twins: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            twin = nn.Parameter(zeros(parameter), parameter.requires_grad)
            if parameter.requires_grad:
                twin.grad = zeros(parameter)
            twins[id(parameter)] = twin
    for tensor in _tensors(optimizer):  # some keep what they need from the beginning
        if tensor.dim():
            twins[id(tensor)] = zeros(tensor)
    imitation = copy.deepcopy(optimizer, twins)
    for group in imitation.param_groups:
        group.update({key: False for key in _ON_THE_DEVICE if key in group})
    return imitation


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    leaves = pytree.tree_leaves([dict(kept) for kept in optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
