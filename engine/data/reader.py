"""Reading: from positions of an epoch to a collated micro-batch, each sample with its own seed.

A sample's random numbers depend on (seed, phase kind, source, epoch, position in the order) only;
on test data the index stands for epoch and position. So augmentation does not depend on workers,
on the order of arrival, on how a batch is cut, or on an interruption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from phaseloop.engine import rng
from phaseloop.engine.errors import DataError


class Request(NamedTuple):
    """What a worker is asked for: one micro-batch.

    Attributes:
        indices: dataset indices, int64 of shape [size].
        seed: hash of all that a sample's seed depends on, but for its key.
        first_key: key of the first sample, the others count up; None: the key is the index.
        weight: see :class:`~phaseloop.engine.data.batch.Batch`.
    """

    indices: Tensor
    seed: int
    first_key: int | None
    weight: int


class Reader(Dataset[Any]):
    """Turns requests into collated data, here or in a worker process.

    Three forms of dataset, the first that fits is used:

    * ``fetch(indices) -> batch``: the fast path, for data without randomness of its own, such as
      tensors in memory; ``indices`` is an int64 tensor, the result is already a batch.
    * ``__getitems__(indices) -> list of samples``: torch's meaning; seeded once per call.
    * ``__getitem__(index) -> sample``: seeded before every call.

    Attributes:
        draws: reading seeds the global generators of the process that reads.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset = dataset
        self._collate = collate or default_collate
        self._fetch = getattr(dataset, "fetch", None)
        self._many = _list_form(dataset)
        self.draws = self._fetch is None

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._read(request)
        except StopIteration as error:
            # It would pass for the loader's own end, and samples would be lost in silence.
            raise DataError(
                f"the dataset raised StopIteration while reading a sample: {error}"
            ) from error

    def _read(self, request: Request) -> Any:
        if self._fetch is not None:
            return self._fetch(request.indices)
        indices = request.indices.tolist()
        keys = (
            indices
            if request.first_key is None
            else range(request.first_key, request.first_key + len(indices))
        )
        if self._many is not None:
            rng.seed_host(rng.mix(request.seed, keys[0]))
            return self._collate(self._many(indices))
        samples = []
        for index, key in zip(indices, keys, strict=True):
            rng.seed_host(rng.mix(request.seed, key))
            samples.append(self.dataset[index])
        # Drawing in a collate function must not depend on the last sample's draws.
        rng.seed_host(rng.mix(request.seed, keys[0], -1))
        return self._collate(samples)


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
