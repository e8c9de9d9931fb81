"""States of torchmetrics' metrics on several processes, put together by each state's own reduction.

A *part* is a single metric: the one that was given, one of a collection, or one inside a wrapper.
What torchmetrics does itself needs the same number of tensors on all processes and waits for ever
where one of them saw nothing; here, a process that saw nothing contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.errors import CheckpointError


@dataclass(frozen=True)
class PartState:
    """State of a part on one process.

    Attributes:
        updates: how many it has seen.
        values: name to a tensor, or to a list of tensors and plain Python.
    """

    updates: int
    values: Mapping[str, Any]


def read(parts: Sequence[Any]) -> list[PartState]:
    """The states of the parts as they are: nothing copied, but lists to concatenate are one tensor.

    What parts share, they share in the result too.
    """
    joined: dict[int, list[Tensor]] = {}
    return [
        PartState(
            int(part._update_count),
            {name: _read(part, name, getattr(part, name), joined) for name in part._defaults},
        )
        for part in parts
    ]


def _read(part: Any, name: str, value: Any, joined: dict[int, list[Tensor]]) -> Any:
    from torchmetrics.utilities import dim_zero_cat

    if isinstance(part._defaults[name], list) and isinstance(value, Tensor):
        return [value]
    if part._reductions[name] is not dim_zero_cat or not isinstance(value, list) or not value:
        return value
    if id(value) not in joined:
        joined[id(value)] = [dim_zero_cat(value)]
    return joined[id(value)]


@contextmanager
def reduced(
    parts: Sequence[Any],
    states: Sequence[Sequence[PartState]],
    gather: Callable[..., list[Tensor]],
) -> Iterator[None]:
    """Within, each part has what its states on all processes reduce to; after it, its own again.

    Args:
        states: by rank, of every part.
        gather: gives a tensor of all processes, by rank; for a metric with a sync of its own.
    """
    own = [
        {name: getattr(part, name) for name in (*part._defaults, "_update_count")} for part in parts
    ]
    try:
        for part, by_rank in zip(parts, zip(*states, strict=True), strict=True):
            if _syncs_itself(part):
                part._sync_dist(gather)
                part._update_count = sum(state.updates for state in by_rank)
            else:
                _set(part, by_rank, _reduced)
        yield
    finally:
        for part, kept in zip(parts, own, strict=True):
            for name, value in kept.items():
                setattr(part, name, value)
            part._computed = None


def merge(parts: Sequence[Any], states: Sequence[Sequence[PartState]], key: str) -> None:
    """Give each part one state that goes on as those of all processes would have.

    Args:
        states: by rank, of every part.
        key: of the meter, for the error.

    Raises:
        CheckpointError: a reduction can only be done at the end, over all processes: a mean over
            processes, a function of the metric's own, or none at all.
    """

    def merged(part: Any, name: str, values: list[Any]) -> Any:
        return _merged(part, name, values, key)

    for part, by_rank in zip(parts, zip(*states, strict=True), strict=True):
        _set(part, by_rank, merged)


def _syncs_itself(part: Any) -> bool:
    """A user's metric with a method of its own; torchmetrics' few do what is done here."""
    function = type(part)._sync_dist
    return not function.__module__.startswith("torchmetrics.")


def _set(
    part: Any, by_rank: Sequence[PartState], together: Callable[[Any, str, list[Any]], Any]
) -> None:
    seen = [state for state in by_rank if _saw_something(part, state)]
    for name in part._defaults if seen else ():
        values = [state.values[name] for state in seen]
        # A single one is what one process would have; some metrics look at the dimensions.
        value = values[0] if len(values) == 1 else together(part, name, values)
        setattr(part, name, value)
    part._update_count = sum(state.updates for state in by_rank)
    part._computed = None


def _saw_something(part: Any, state: PartState) -> bool:
    """Some keep a part of their state over a reset, so the updates alone do not tell."""
    return state.updates > 0 or any(
        _differ(default, state.values[name]) for name, default in part._defaults.items()
    )


def _differ(default: Any, value: Any) -> bool:
    if isinstance(default, list):
        return len(value) > 0
    return not torch.equal(default.to(value.device), value)


def _reduced(part: Any, name: str, values: list[Any]) -> Any:
    """As torchmetrics' ``Metric._sync_dist`` does it with what it has gathered."""
    reduction = part._reductions[name]
    if isinstance(values[0], list):
        flat = [value for by_rank in values for value in by_rank]
        return reduction(flat) if reduction is not None and flat else flat
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _merged(part: Any, name: str, values: list[Any], key: str) -> Any:
    from torchmetrics.utilities import dim_zero_max, dim_zero_min, dim_zero_sum

    reduction = part._reductions[name]
    if isinstance(values[0], list):  # as if one process had seen all
        return [value for by_rank in values for value in by_rank]
    if reduction in (dim_zero_sum, dim_zero_max, dim_zero_min):
        return reduction(torch.stack(values)).to(values[0].dtype)
    raise CheckpointError(
        f"meters.{key}: the checkpoint is from the middle of a phase on another number of "
        f"processes, and state {name!r} of {type(part).__name__} cannot be put together before "
        f"the phase's end. Resume on as many processes as before, from a checkpoint at an "
        f"epoch's end, or without this meter"
    )
