"""Watched values: kept on the device until somebody looks; then the first that is not finite."""

from __future__ import annotations

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
    """What has been watched since it was last looked at, in order."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._older: Tensor | None = None  # on the device: number of the first bad update, or 0

    def add(self, seen: Seen) -> None:
        self._seen.append(seen)
        if len(self._seen) >= _KEPT:
            self._condense()

    def first_bad(self) -> Found | None:
        """Here the host waits for the device."""
        if self._older is not None and (update := int(self._older)):
            return Found(update)
        if not self._seen:
            return None
        bad = self._flags()
        if not bool(bad.any()):
            return None
        index = int(bad.int().argmax())
        seen = self._seen[index]
        earlier = [entry for entry in self._seen[:index] if entry.update < seen.update]
        return Found(seen.update, seen, earlier[-1] if earlier else None)

    def _flags(self) -> Tensor:
        return ~torch.stack([entry.value.reshape(()) for entry in self._seen]).isfinite()

    def _condense(self) -> None:
        """On the device, so that what waits for a log point is bounded; the samples are let go."""
        bad = self._flags()
        updates = torch.tensor([entry.update for entry in self._seen], device=bad.device)
        first = torch.where(bad.any(), updates[bad.int().argmax()], 0)
        self._older = (
            first if self._older is None else torch.where(self._older > 0, self._older, first)
        )
        self._seen = []
