"""Batch: what a train step gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Batch:
    """One micro-batch on the device.

    Attributes:
        data: what the dataset and its collate function made, moved to the device.
        input: the first of a pair, or ``data["input"]``, else ``data`` itself.
        target: the second of a pair, or ``data["target"]``, else None.
        indices: dataset indices of the samples, int64 of shape [size], on the CPU.
        size: number of samples.
        weight: how many of them count: ``size``, or 0 for a stand-in that only keeps this
            process in step with the others.
    """

    __slots__ = ("data", "indices", "input", "size", "target", "weight")

    def __init__(self, data: Any, indices: Tensor, weight: int) -> None:
        self.data = data
        self.indices = indices
        self.size = indices.numel()
        self.weight = weight
        if isinstance(data, (tuple, list)) and len(data) == 2:
            self.input, self.target = data
        elif isinstance(data, Mapping) and "input" in data:
            self.input, self.target = data["input"], data.get("target")
        else:
            self.input, self.target = data, None
