"""Reading: from positions of an epoch to a collated micro-batch, each sample with its own seed.

A sample's random numbers depend on (seed, phase kind, source, epoch, position in the order) only;
on test data the index stands for epoch and position. So augmentation does not depend on workers,
on the order of arrival, on how a batch is cut, or on an interruption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset, default_collate

from phaseloop.engine import rng
from phaseloop.engine.data import failed
from phaseloop.engine.data.mix import Mix
from phaseloop.engine.data.places import USUAL, placed
from phaseloop.engine.errors import ConfigError, DataError

_SHOWN = 8  # of the samples of a micro-batch, in a message


class Request(NamedTuple):
    """What a worker is asked for: one micro-batch.

    Attributes:
        indices: dataset indices, int64 of shape [size]; of a mix, within the source.
        seed: hash of all that a sample's seed depends on, but for its key.
        first_key: key of the first sample, the others count up; None: the key is the index.
        weight: see :class:`~phaseloop.engine.data.batch.Batch`.
        sources: of a mix, the source of each sample, int64 of shape [size]; else None.
        seeds: of a mix, ``seed`` for each source.
    """

    indices: Tensor
    seed: int
    first_key: int | None
    weight: int
    sources: Tensor | None = None
    seeds: tuple[int, ...] = ()


class Reader(Dataset[Any]):
    """Turns requests into collated data, here or in a worker process.

    Three forms of dataset, the first that fits is used:

    * ``fetch(indices) -> batch``: the fast path, for data without randomness of its own, such as
      tensors in memory; ``indices`` is an int64 tensor, the result is already a batch.
    * ``__getitems__(indices) -> list of samples``: torch's meaning; seeded once per call.
    * ``__getitem__(index) -> sample``: seeded before every call.

    In a mix, ``fetch`` is used where every source has it, and what the sources give is put
    together in the order of the samples; otherwise samples are read, and seeded, one by one.

    Args:
        dataset: the dataset, or a mix.
        collate: list of samples to a batch; None: torch's.
        transform: called with a batch, gives another.
        key: where the set stands in the configuration, for messages.

    Attributes:
        draws: reading seeds the global generators of the process that reads.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        key: str = USUAL,
    ) -> None:
        self.dataset = dataset
        self._key = key
        self._collate = collate or default_collate
        self._transform = transform
        self._mix = dataset if isinstance(dataset, Mix) else None
        sets = [dataset] if self._mix is None else self._mix.datasets
        self._fetches = all(hasattr(one, "fetch") for one in sets)
        self._many = None if self._mix is not None else _list_form(dataset)
        self._getters = [_getter(one) for one in sets]
        self.draws = not self._fetches or transform is not None

    def __getitem__(self, request: Request) -> Any:
        if not request.indices.numel():
            return None
        try:
            return self._read(request)
        except StopIteration as error:
            # It would pass for the loader's own end, and samples would be lost in silence.
            failure: Exception = DataError(
                f"the dataset raised StopIteration while reading a sample: {error}"
            )
            failure.__cause__ = error
        except Exception as error:
            failure = error
        self._note(failure, request, None)
        return failed.hand_on(failure)

    def _note(self, error: Exception, request: Request, position: int | None) -> None:
        """Keep with the error what was being read: a sample of the request, or all of it."""
        indices = request.indices.tolist()
        names = None
        if self._mix is not None and request.sources is not None:
            names = [self._mix.names[source] for source in request.sources.tolist()]
        if position is not None:
            place = self._key if names is None else f"{self._key}.mix.{names[position]}"
            what = f"sample {indices[position]} of {place}"
        else:
            shown = ", ".join(map(str, indices[:_SHOWN]))
            what = f"samples {shown}{', ...' if len(indices) > _SHOWN else ''} of {self._key}"
        sample = None if position is None else indices[position]
        failed.note(error, what, set=self._key, indices=indices, sources=names, sample=sample)

    def _read(self, request: Request) -> Any:
        batch = self._fetched(request) if self._fetches else self._collated(request)
        if self._transform is not None and batch is not None:
            rng.seed_host(rng.mix(request.seed, _keys(request)[0], -2))
            try:
                batch = self._transform(batch)
            except (ConfigError, DataError) as error:
                raise placed(error, self._key) from error
        return batch

    def _fetched(self, request: Request) -> Any:
        if request.sources is None:
            return self.dataset.fetch(request.indices)
        parts, places = [], []
        for source, dataset in enumerate(self.dataset.datasets):
            place = (request.sources == source).nonzero().flatten()
            if len(place):
                parts.append(dataset.fetch(request.indices[place]))
                places.append(place)
        return _joined(parts, torch.cat(places).argsort())

    def _collated(self, request: Request) -> Any:
        indices, keys = request.indices.tolist(), _keys(request)
        if self._many is not None:
            rng.seed_host(rng.mix(request.seed, keys[0]))
            return self._collate(self._many(indices))
        sources = [0] * len(indices) if request.sources is None else request.sources.tolist()
        seeds = request.seeds or (request.seed,)
        samples: list[Any] = []
        try:
            for source, index, key in zip(sources, indices, keys, strict=True):
                rng.seed_host(rng.mix(seeds[source], key))
                samples.append(self._getters[source](index))
        except Exception as error:
            self._note(error, request, len(samples))
            raise
        # Drawing in a collate function must not depend on the last sample's draws.
        rng.seed_host(rng.mix(request.seed, keys[0], -1))
        return self._collate(samples)


def _keys(request: Request) -> Sequence[int]:
    if request.first_key is None:
        keys: list[int] = request.indices.tolist()
        return keys
    return range(request.first_key, request.first_key + len(request.indices))


def _getter(dataset: Any) -> Callable[[int], Any]:
    """Reads one sample; of a dataset that gives lists only, a list of one."""
    own = getattr(type(dataset), "__getitem__", None)
    if own in (None, Dataset.__getitem__) and hasattr(dataset, "__getitems__"):
        return functools.partial(_one, dataset)
    return getattr(dataset, "__getitem__", functools.partial(_one, dataset))


def _one(dataset: Any, index: int) -> Any:
    return dataset.__getitems__([index])[0]


def _joined(parts: list[Any], order: Tensor) -> Any:
    """Batches of the same form as one, its samples in this order."""
    leaves = [pytree.tree_flatten(part) for part in parts]
    form = leaves[0][1]
    if any(other != form for _, other in leaves):
        raise DataError("the sources of a mix give batches of different forms")
    columns = zip(*(found for found, _ in leaves), strict=True)
    return pytree.tree_unflatten([torch.cat(column)[order] for column in columns], form)


def _list_form(dataset: Any) -> Callable[[list[int]], list[Any]] | None:
    """``__getitems__`` of the dataset, if it has one of its own.

    torch's Subset has one only to pass it on; where there is nothing to pass it on to, samples
    are read, and seeded, one by one.
    """
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    has_one = callable(getattr(inner, "__getitems__", None))
    return getattr(dataset, "__getitems__", None) if has_one else None


class TensorData(Dataset[Any]):
    """Tensors in memory, indexed along their first dimension; read by the fast path.

    Args:
        tensors: one or more tensors of the same first size N; a sample is the tuple of their
            rows, or the row itself when there is one tensor.

    Raises:
        DataError: the first sizes differ.
    """

    def __init__(self, *tensors: Tensor) -> None:
        sizes = {len(t) for t in tensors}
        if len(sizes) != 1:
            raise DataError(f"TensorData needs tensors of one first size, got {sorted(sizes)}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        row = tuple(t[index] for t in self.tensors)
        return row if len(row) > 1 else row[0]

    def fetch(self, indices: Tensor) -> Any:
        """The rows at ``indices``, int64 of shape [B]; each tensor becomes [B, ...]."""
        rows = [t[indices] for t in self.tensors]
        return tuple(rows) if len(rows) > 1 else rows[0]
