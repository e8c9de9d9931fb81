"""The readers of a stream: this process or its workers, through torchdata's loader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from phaseloop.engine import rng
from phaseloop.engine.data import workers
from phaseloop.engine.data.planned import SetsAside
from phaseloop.engine.data.stream_reader import Collected, Windows
from phaseloop.engine.data.stream_state import Standing, given, taken


class Read(NamedTuple):
    """A window, and where the readers stood behind it."""

    collected: Collected
    standing: Standing


class Readers(SetsAside):
    """Reads a stream's windows one after the other, in turn from each worker.

    Reading never touches the global generators of this process, as seen from outside: they are
    put aside before and put back after.

    Args:
        windows: what is read.
        count: workers; 0: this process reads.
        prefetch: windows that each worker reads ahead.
        pinned: windows are copied to page-locked memory.
        stateful: where they stand is asked for after every window.

    Attributes:
        stateful: as given.
        windows, samples: read in the pass at hand, over its interruptions.
        over: the pass at hand has come to its end.
    """

    def __init__(
        self, windows: Windows, count: int, prefetch: int, pinned: bool, stateful: bool
    ) -> None:
        self._source = windows
        self._count = count
        self._prefetch = prefetch
        self._pinned = pinned
        self.stateful = stateful
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Collected] | None = None
        self._processes: list[BaseProcess] = []
        self._epoch = 0
        self.windows = 0
        self.samples = 0
        self.over = False

    def begin(self, epoch: int, start: Standing | None) -> None:
        """Begin a pass, from its start or from where one stood."""
        if not self.over or start is not None:
            # Of a pass that was given up, workers may be in the middle of a slow sample.
            self.close()
        if self._loader is None:
            self._loader = self._make_loader()
        if start is not None and isinstance(self._loader, StatefulDataLoader):
            self._loader.load_state_dict(given(start, self._count))
        self._epoch, self.over = epoch, False
        self.windows = 0 if start is None else start.windows
        self.samples = 0 if start is None else start.samples
        if self._count and not self._processes:
            # Starting processes must not be interrupted by a signal.
            self._iterator = workers.start(self._loader.__iter__, self._processes)
        else:
            self._iterator = iter(self._loader)

    def read(self) -> Read | None:
        """The next window; None: the pass is over."""
        assert self._iterator is not None
        if self._count:
            return self._read()
        with rng.alone:
            self._aside = rng.HostGenerators()
            return self._read()

    def _read(self) -> Read | None:
        assert self._iterator is not None
        try:
            collected = next(self._iterator, None)
            if collected is None:
                self.over = True
                return None
            self.windows += 1
            self.samples += sum(size for _, size in collected)
            standing = Standing(self._epoch, self.windows, self.samples)
            if isinstance(self._loader, StatefulDataLoader):
                state = self._loader.state_dict()
                standing = taken(state, self._epoch, self.windows, self.samples)
            return Read(collected, standing)
        finally:
            self.put_back()

    def close(self) -> None:
        """End the worker processes, and the pass at hand."""
        if self._processes:
            workers.end(self._processes, self._let_go)
        self._processes = []
        self._let_go()

    def _let_go(self) -> None:
        self._loader = self._iterator = None

    def _make_loader(self) -> DataLoader[Any]:
        kind = StatefulDataLoader if self.stateful else DataLoader
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchdata calls what torch has retired
            return kind(
                self._source,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self._count,
                prefetch_factor=self._prefetch if self._count else None,
                pin_memory=self._pinned,
                persistent_workers=self._count > 0,
                worker_init_fn=workers.prepare_worker if self._count else None,
                # Its own generator: an iterator draws from it, and must not draw from ours.
                generator=torch.Generator().manual_seed(0),
            )


def _as_it_is(data: Any) -> Any:
    return data
