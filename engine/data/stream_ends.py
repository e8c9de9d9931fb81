"""Ends of a stream on several processes: what one has left; whether it reads what others read."""

from __future__ import annotations

import time
import zlib
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.data.stream_readers import Read, Readers
from phaseloop.engine.trees import map_tensors

PATIENCE = 1.0
"""Seconds for which samples are read that nobody trains on, only to count them."""


def count_left(read: Read | None, readers: Readers, go_on: bool) -> tuple[int, bool]:
    """Samples that a process has left in the pass at hand, and whether these are all.

    Args:
        read: what was read and not given.
        readers: in the middle of the pass.
        go_on: read what is behind it, for as long as :data:`PATIENCE` allows.
    """
    if read is None:
        return 0, True
    samples, until = _samples(read), time.monotonic() + PATIENCE
    while go_on and time.monotonic() < until:
        try:
            read = readers.read()
        except Exception:  # of a sample that was not asked for; the count says "at least"
            break
        if read is None:
            return samples, True
        samples += _samples(read)
    return samples, False


def _samples(read: Read) -> int:
    return sum(size for _, size in read.collected)


def mark_of(batch: Any) -> int:
    """A number for the values in a batch, the same for equal ones on all processes; never 0.

    Of equal batches only: two with the same number may differ, at one in 2³² pairs.
    """
    mark = 0

    def take(tensor: Tensor) -> Tensor:
        nonlocal mark
        if tensor.layout is torch.strided:
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            mark = zlib.crc32(values.numpy().data, mark)
        return tensor

    def take_other(value: Any) -> Any:
        nonlocal mark
        mark = zlib.crc32(repr(value).encode(), mark)
        return value

    map_tensors(take, batch, take_other)
    return mark or 1
