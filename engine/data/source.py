"""Data: what a user says about one set of samples, checked before a run needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from phaseloop.engine.errors import ConfigError, DataError


@dataclass
class Data:
    """One set of samples and how it is cut into batches.

    Args:
        dataset: anything with ``len`` and one of ``fetch``, ``__getitems__``, ``__getitem__``.
        batch_size: samples per update, over all processes.
        micro_batch_size: how many go through the model at once on one process; None: all.
        accumulate: the same as a count of micro-batches per update; give one of the two.
        shuffle: a new order each epoch; training data only.
        drop_last: leave out a last batch smaller than ``batch_size``; training data only.
        workers: processes that read ahead; 0: read in this process.
        prefetch: micro-batches that each worker reads ahead.
        pin_memory: copy through page-locked memory; None: where the device is a GPU.
        collate: list of samples to a batch; None: torch's ``default_collate``.
    """

    dataset: Any
    batch_size: int
    micro_batch_size: int | None = None
    accumulate: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def check(self, key: str, train: bool) -> None:
        """Check what can be checked without reading a sample.

        Args:
            key: where this is in the configuration, e.g. ``data.train``.
            train: it is training data.

        Raises:
            ConfigError: a number is out of range, or options contradict each other.
            DataError: the dataset is empty, or too small to make one batch.
        """
        check_options(self, key)
        if self.drop_last and not train:
            raise ConfigError(f"{key}.drop_last", "no sample of a test set is ever left out")
        if self.collate is not None and hasattr(self.dataset, "fetch"):
            raise ConfigError(
                f"{key}.collate",
                f"{type(self.dataset).__name__}.fetch makes whole batches: nothing is collated",
            )
        if not hasattr(self.dataset, "__len__"):
            raise ConfigError(f"{key}.dataset", f"{type(self.dataset).__name__} has no length")
        samples = len(self.dataset)
        if samples == 0:
            raise DataError(f"{key}: the dataset is empty: it has 0 samples")
        if self.drop_last and samples < self.batch_size:
            raise DataError(
                f"{key}: {samples} samples do not fill one batch of {self.batch_size}, and "
                f"{key}.drop_last leaves out the rest: there is nothing to train on"
            )


class Options(Protocol):
    """What :class:`Data` and the configuration's schema have in common."""

    batch_size: int
    micro_batch_size: int | None
    accumulate: int | None
    workers: int
    prefetch: int
    pin_memory: bool | None


def check_options(options: Options, key: str) -> None:
    """Raises ConfigError for a number out of range and for options that contradict each other."""
    least = {"batch_size": 1, "micro_batch_size": 1, "accumulate": 1, "workers": 0, "prefetch": 1}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise ConfigError(f"{key}.{name}", f"{value} is less than {bound}")
    if options.micro_batch_size is not None and options.accumulate is not None:
        raise ConfigError(f"{key}.accumulate", "give micro_batch_size or accumulate, not both")
    if options.pin_memory and not options.workers:
        raise ConfigError(f"{key}.pin_memory", "only what workers read is pinned: set workers too")
