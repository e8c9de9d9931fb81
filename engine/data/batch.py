"""Batch: what a train step gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from phaseloop.engine.trees import like_tuple, with_items

_PAIR, _MAPPING, _DATACLASS, _ALONE = range(4)  # forms of data


class Batch:
    """One micro-batch on the device.

    Attributes:
        data: what the dataset and its collate function made, moved to the device.
        input: the first of a pair, ``data["input"]`` of a mapping, ``data.input`` of a dataclass
            that has one, else ``data`` itself.
        target: the second of a pair, or ``target`` beside such an ``input``, else None.
        indices: dataset indices of the samples, int64 of shape [size], on the CPU; of a stream,
            which has none, their numbers in the pass, from 0, in the order they came.
        sources: of a mix, the number of each sample's source, int64 of shape [size], on the CPU;
            ``indices`` then count within the source. Without a mix, None.
        size: number of samples.
        weight: how many of them count: ``size``, or 0 for a stand-in that only keeps this
            process in step with the others.
    """

    __slots__ = ("_form", "data", "indices", "input", "size", "sources", "target", "weight")

    def __init__(
        self, data: Any, indices: Tensor, weight: int, sources: Tensor | None = None
    ) -> None:
        self.data = data
        self.indices = indices
        self.sources = sources
        self.size = indices.numel()
        self.weight = weight
        if isinstance(data, (tuple, list)) and len(data) == 2:
            self._form = _PAIR
            self.input, self.target = data
        elif isinstance(data, Mapping) and "input" in data:
            self._form = _MAPPING
            self.input, self.target = data["input"], data.get("target")
        elif is_dataclass(data) and hasattr(data, "input"):
            self._form = _DATACLASS
            self.input, self.target = data.input, getattr(data, "target", None)
        else:
            self._form = _ALONE
            self.input, self.target = data, None

    def with_input(self, input: Any) -> Batch:
        """The same samples with another input, in data of the same type.

        Data that was nothing but input becomes a mapping with it: of a tuple the second would be
        taken for a target.
        """
        data = self.data
        if self._form == _PAIR:
            data = like_tuple(data, [input, data[1]])
        elif self._form == _MAPPING:
            data = with_items(data, {"input": input})
        elif self._form == _DATACLASS:
            data = dataclasses.replace(data, input=input)
        else:
            data = {"input": input}
        return self.with_data(data)

    def with_data(self, data: Any) -> Batch:
        """The same samples as ``data``."""
        return Batch(data, self.indices, self.weight, self.sources)
