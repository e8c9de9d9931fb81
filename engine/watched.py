"""Watched values: kept on the device until somebody looks; then the first that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

_KEPT = 1024  # so many values are kept with their samples, however far away the log point is


class Seen(NamedTuple):
    """A value that was watched, and where it came from.

    Attributes:
        what: ``the loss`` or ``a gradient``.
        value: one element, on the device; not finite when something was not.
        update: number of the update that it was part of.
        epoch, window: number of the epoch, and of the batch in it.
        samples: dataset indices, by micro-batch.
        trained, norms: parameters, and the norm of each one's gradient; None: not known.
    """

    what: str
    value: Tensor
    update: int
    epoch: int
    window: int
    samples: list[Tensor]
    trained: list[nn.Parameter] | None
    norms: Tensor | None


class Found(NamedTuple):
    """The first value that was not finite; ``seen`` is None where only its update is known."""

    update: int
    seen: Seen | None = None
    before: Seen | None = None


class Watched:
    """What has been watched since it was last looked at, in order.

    Args:
        to_host: of a lazy device: what it takes to read values of steps that are over. Else each
            number of values would be a program of its own.
    """

    def __init__(self, to_host: Callable[[list[Tensor]], list[Tensor]] | None = None) -> None:
        self._to_host = to_host
        self._seen: list[Seen] = []
        self._older: Tensor | None = None  # on the device: number of the first bad update, or 0

    def add(self, seen: Seen) -> None:
        self._seen.append(seen)
        if len(self._seen) < _KEPT:
            return
        if self._to_host is None:
            self._condense(self._seen)
            self._seen = []
        elif over := [entry for entry in self._seen if entry.update < seen.update]:
            self._condense(over)
            self._seen = self._seen[len(over) :]

    def first_bad(self) -> Found | None:
        """Here the host waits for the device."""
        if self._older is not None and (update := int(self._older)):
            return Found(update)
        if not self._seen:
            return None
        bad = self._flags(self._seen)
        if not bool(bad.any()):
            return None
        index = int(bad.int().argmax())
        seen = self._seen[index]
        earlier = [entry for entry in self._seen[:index] if entry.update < seen.update]
        return Found(seen.update, seen, earlier[-1] if earlier else None)

    def _flags(self, seen: list[Seen]) -> Tensor:
        values = [entry.value for entry in seen]
        if self._to_host is not None:
            values = self._to_host(values)
        return ~torch.stack([value.reshape(()) for value in values]).isfinite()

    def _condense(self, seen: list[Seen]) -> None:
        """On the device, so that what waits for a log point is bounded; the samples are let go."""
        bad = self._flags(seen)
        updates = torch.tensor([entry.update for entry in seen], device=bad.device)
        first = torch.where(bad.any(), updates[bad.int().argmax()], 0)
        self._older = (
            first if self._older is None else torch.where(self._older > 0, self._older, first)
        )
