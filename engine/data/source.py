"""Data: what a user says about one set of samples, checked before a run needs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phaseloop.engine import rng
from phaseloop.engine.data.augment import chain
from phaseloop.engine.data.mix import Mix
from phaseloop.engine.data.options import Limit, batch_sizes, check_limit, check_options, limited
from phaseloop.engine.data.samplers import Sampler
from phaseloop.engine.data.stream_options import check_stream
from phaseloop.engine.data.stream_reader import is_stream
from phaseloop.engine.device_kinds import kind_of
from phaseloop.engine.errors import ConfigError, DataError


@dataclass
class Data:
    """One set of samples and how it is cut into batches.

    Args:
        dataset: anything with ``len`` and one of ``fetch``, ``__getitems__``, ``__getitem__``; a
            stream, which is an ``IterableDataset``; a :class:`~phaseloop.engine.data.mix.Mix` of
            several; or, with ``rebuild_every``, a function that makes a dataset.
        batch_size: samples per update, over all processes. For training data also a mapping from
            an epoch to the size from that epoch on, which begins with 1: ``{1: 32, 5: 64}``.
        micro_batch_size: how many go through the model at once on one process; None: all.
        accumulate: the same as a count of micro-batches per update; give one of the two.
        shuffle: a new order each epoch; training data only. None: yes, but not of a stream,
            which comes in its own order.
        drop_last: leave out a last batch smaller than ``batch_size``; training data only.
        workers: processes that read ahead; 0: read in this process.
        prefetch: micro-batches that each worker reads ahead; of a stream, batches.
        pin_memory: copy through page-locked memory; None: where the device is a GPU.
        collate: list of samples to a batch; None: torch's ``default_collate``.
        limit: only part of the samples: a number (int) or a fraction (float), chosen by the seed,
            the same in every epoch; a test reads them in the dataset's order.
        to_device: called with a batch and the device, gives the batch there; None: see
            :func:`~phaseloop.engine.data.transfer.to_device`.
        sampler: says what an epoch
            draws in which order; training data only.
        batch_transform: called with a collated micro-batch, gives another; training data only.
        augment: one augmentation, several in their order, or a mapping of names to them: functions
            of (input, :class:`~phaseloop.engine.data.augment.Draws`), called with each micro-batch
            on the device; training data only.
        views: how often each batch is augmented, by other draws; of 2 the input is a pair.
        rebuild_every: make the dataset again every so many epochs; training data only. The
            function is given the epoch it makes the dataset for, if it takes an ``epoch``, and
            finds the generators seeded from that epoch.
    """

    dataset: Any
    batch_size: int | Mapping[int, int]
    micro_batch_size: int | None = None
    accumulate: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    collate: Callable[[list[Any]], Any] | None = None
    limit: Limit = None
    to_device: Callable[[Any, Any], Any] | None = None
    sampler: Sampler | None = None
    batch_transform: Callable[[Any], Any] | None = None
    augment: Any = None
    views: int = 1
    rebuild_every: int | None = None
    first: Any = field(default=None, init=False, repr=False)
    """The dataset of the first epoch, from :meth:`open` on until another one is made."""

    @property
    def sizes(self) -> dict[int, int]:
        """Epoch to batch size from there on, the first epoch first."""
        return batch_sizes(self.batch_size)

    @property
    def shuffled(self) -> bool:
        """Every epoch has another order."""
        return not is_stream(self.first) if self.shuffle is None else self.shuffle

    def stream_length(self) -> int | None:
        """Samples in a pass through the stream, as far as it or ``limit`` says; None: unknown."""
        if not hasattr(self.first, "__len__"):
            return None
        try:
            return limited(len(self.first), self.limit)
        except (TypeError, NotImplementedError):  # as torch has it: a length that there is not
            return None

    def pins(self, device: torch.device) -> bool:
        """Batches for this device are copied to page-locked memory.

        Pinning in this process would cost a copy in the hot path, so only workers' data is.
        """
        wanted = kind_of(device).pins if self.pin_memory is None else self.pin_memory
        return wanted and self.workers > 0

    def open(self, seed: int, key: str) -> None:
        """Make ``first``: the dataset itself, or what its function makes.

        Raises:
            ConfigError: there is a function and no ``rebuild_every``, or the other way round.
        """
        if self.rebuild_every is None:
            self.first = self.dataset
        elif not callable(self.dataset) or (
            hasattr(self.dataset, "__len__") and not isinstance(self.dataset, type)
        ):
            raise ConfigError(
                f"{key}.rebuild_every", "the dataset must be a function or a class that makes it"
            )
        else:
            self.first = self.make(1, seed)

    def make(self, epoch: int, seed: int) -> Any:
        """What the dataset's function makes for ``epoch``; drawing in it does not show outside."""
        with rng.aside(rng.mix(seed, rng.REBUILD, epoch)):
            takes = "epoch" in inspect.signature(self.dataset).parameters
            return self.dataset(epoch=epoch) if takes else self.dataset()

    def check(self, key: str, train: bool) -> None:
        """Check what can be checked without reading a sample, once it is open.

        Args:
            key: where this is in the configuration, e.g. ``data.train``.
            train: it is training data.

        Raises:
            ConfigError: a number is out of range, or options contradict each other.
            DataError: the dataset is empty, or too small to make one batch.
        """
        check_options(self, key)
        chain(self.augment, self.views, key)
        if not train:
            self._check_test(key)
        if self.collate is not None and hasattr(self.first, "fetch"):
            raise ConfigError(
                f"{key}.collate",
                f"{type(self.first).__name__}.fetch makes whole batches: nothing is collated",
            )
        if is_stream(self.first):
            check_stream(self, key, train)
            return
        if not hasattr(self.first, "__len__"):
            raise ConfigError(
                f"{key}.dataset",
                f"{type(self.first).__name__} has no length, and is no IterableDataset of torch's",
            )
        samples = len(self.first)
        if samples == 0:
            raise DataError(f"{key}: the dataset is empty: it has 0 samples")
        self._check_order(key)
        check_limit(self.limit, samples, f"{key}.limit")
        if self.sampler is None:
            self.check_samples(limited(samples, self.limit), key)

    def _check_test(self, key: str) -> None:
        if self.drop_last:
            raise ConfigError(f"{key}.drop_last", "no sample of a test set is ever left out")
        for name in ("sampler", "batch_transform", "augment", "rebuild_every"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{key}.{name}", "it is for training data only")
        if self.views != 1:
            raise ConfigError(f"{key}.views", "it is for training data only")
        if not isinstance(self.batch_size, int):
            raise ConfigError(f"{key}.batch_size", "sizes by epoch are for training data only")
        if isinstance(self.first, Mix):
            raise ConfigError(f"{key}.dataset", "a mix is for training data only")

    def _check_order(self, key: str) -> None:
        """Options that all say what is drawn in which order."""
        mixed = isinstance(self.first, Mix)
        if mixed and self.limit is not None:
            raise ConfigError(f"{key}.limit", f"give each source its own: {key}.mix.NAME.limit")
        if mixed and self.sampler is not None:
            raise ConfigError(f"{key}.sampler", "samples of a mix are drawn by its weights")
        if self.sampler is not None and self.shuffle is False:
            raise ConfigError(f"{key}.shuffle", f"{key}.sampler says which order it is")
        if not isinstance(self.sampler, Sampler | None):
            raise ConfigError(
                f"{key}.sampler", f"{type(self.sampler).__name__} is not a phaseloop.Sampler"
            )
        if self.sampler is not None:
            self.sampler.check(self.first, f"{key}.sampler")

    def check_samples(self, samples: int, key: str) -> None:
        """Raises DataError when an epoch of ``samples`` is too small to make one batch."""
        largest = max(self.sizes.values())
        if self.drop_last and samples < largest:
            raise DataError(
                f"{key}: {samples} samples do not fill one batch of {largest}, and "
                f"{key}.drop_last leaves out the rest: there is nothing to train on"
            )
