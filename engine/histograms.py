"""Histograms: how the values of a tensor are spread, counted where the tensor lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.shards import is_shard, local

BINS = 64


@dataclass(frozen=True)
class Histogram:
    """The finite values of a tensor, counted in intervals of equal width from least to greatest.

    Attributes:
        facts: float64 [5]: the least value, the greatest, how many there are, their sum, and the
            sum of their squares.
        counts: int64 [BINS]; a value at a border belongs to the interval above it, and the
            greatest to the last one. Where all values are equal they are in the first.
    """

    facts: Tensor
    counts: Tensor

    def limits(self) -> Tensor:
        """Upper ends of the intervals, float64 [BINS]."""
        least, greatest = self.facts[:2]
        shares = torch.arange(1, BINS + 1, dtype=torch.float64) / BINS
        limits = least * (1 - shares) + greatest * shares  # no difference that may overflow
        limits[-1] = greatest
        return limits


def histogram_of(tensor: Tensor) -> Histogram | None:
    """Counted on its device, where nobody waits for it; None: there is no value.

    Of a sparse tensor the values that it holds. Where the tensor is sharded all processes have to
    call this, and each gets the histogram of the whole.

    Args:
        tensor: of any shape, real.
    """
    part = local(tensor.detach())
    if part.is_sparse:
        part = part.coalesce().values()
    if not (tensor.numel() if is_shard(tensor) else part.numel()):
        return None
    x = part.flatten().to(torch.promote_types(part.dtype, torch.float32))
    finite = x.isfinite()
    ends = _ends(x, finite)
    if is_shard(tensor):
        _reduce(tensor, ends, torch.distributed.ReduceOp.MAX)
    least, greatest = -ends[0], ends[1]
    x = x.where(finite, 0.0)
    # Halves, since the width of what float32 holds may be more than it holds.
    width = greatest / 2 - least / 2
    place = (x / 2 - least.to(x.dtype) / 2) / width.where(width > 0, 1.0).to(x.dtype) * BINS
    place = place.floor().clamp(0, BINS - 1).long().where(finite, BINS)
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, place, counts.new_ones(()).expand_as(place))
    sums = torch.stack(
        [
            finite.sum().double(),
            x.sum(dtype=torch.float64),
            torch.linalg.vector_norm(x, dtype=torch.float64).square(),
        ]
    )
    if is_shard(tensor):
        _reduce(tensor, counts)
        _reduce(tensor, sums)
    return Histogram(torch.cat([least[None], greatest[None], sums]), counts[:BINS])


def check(name: str, tensor: Tensor) -> None:
    """Raises ConfigError for what has no histogram."""
    key = f"record_histogram({name!r})"
    if not isinstance(tensor, Tensor):
        raise ConfigError(key, f"give a tensor, not a {type(tensor).__name__}")
    if tensor.is_complex() or tensor.is_quantized:
        raise ConfigError(key, f"{tensor.dtype} has no order; give real numbers, such as .abs()")


def _ends(x: Tensor, finite: Tensor) -> Tensor:
    """The least value with its sign turned, and the greatest, float64; of none -inf."""
    none = torch.full((1,), float("-inf"), dtype=x.dtype, device=x.device)
    low = torch.cat([(-x).where(finite, float("-inf")), none]).amax()
    high = torch.cat([x.where(finite, float("-inf")), none]).amax()
    return torch.stack([low, high]).double()


def _reduce(
    like: Tensor, tensor: Tensor, how: torch.distributed.ReduceOp.RedOpType | None = None
) -> None:
    """Over the processes that ``like`` is sharded over, in place; a sum where nothing is said."""
    how = torch.distributed.ReduceOp.SUM if how is None else how
    group = like.device_mesh.get_group()  # type: ignore[attr-defined]
    torch.distributed.all_reduce(tensor, how, group=group)
