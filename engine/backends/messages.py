"""Messages: tensors put together to be sent, in pieces of a bounded size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

MESSAGE = 25 * 2**20
"""Bytes; what is sent together is copied together, so this is what it takes beside the model."""


def by_type(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return found


def in_messages(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, or views of their parts, in lists of ``MESSAGE`` bytes at most."""
    pieces: list[Tensor] = []
    size = 0
    for piece in itertools.chain.from_iterable(map(_pieces, tensors)):
        if pieces and size + piece.nbytes > MESSAGE:
            yield pieces
            pieces, size = [], 0
        pieces.append(piece)
        size += piece.nbytes
    if size:
        yield pieces


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Along the first dimensions, which is a view in any memory layout."""
    if tensor.nbytes <= MESSAGE or not tensor.dim():
        yield tensor
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        for part in torch.split(tensor, max(1, MESSAGE * len(tensor) // tensor.nbytes)):
            yield from _pieces(part)


def spread(flat: Tensor, tensors: list[Tensor]) -> None:
    """Write the pieces of ``flat`` into the tensors that it was made of."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def once(tensor: Tensor) -> Tensor:
    """A tensor that was expanded, without its repetitions: nothing can be written into those."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
