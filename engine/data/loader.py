"""Loaders: the windows of an epoch as micro-batches on the device, from any position on."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from phaseloop.engine import rng
from phaseloop.engine.data import workers
from phaseloop.engine.data.augment import chain, sample_keys
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.epochs import Epochs
from phaseloop.engine.data.mix import Mix
from phaseloop.engine.data.plan import BatchPlan, Window
from phaseloop.engine.data.planned import Planned, SetsAside
from phaseloop.engine.data.reader import Reader, Request
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import DataError


class Loader(Planned, SetsAside):
    """Micro-batches of one set of samples, epoch by epoch.

    Reading never touches the global generators of this process, as seen from outside: they are
    put aside before and put back after.

    Args:
        data: the set and how it is cut.
        train: a train set (order and seeds by epoch) or a test set (dataset order, seeds by
            index, so that a test gives the same result at every epoch).
        source: number of the set among those of its kind; part of every sample's seed.
        seed: the run's seed.
        device: where batches go.
        world_size: number of processes.
        rank: which of them this is.
        key: where the set stands in the configuration, for messages.
        at_most: read the first so many batches of an epoch only.
        repeat: every epoch is the first one again, to the bit.
        in_step: processes go through the model together, so one that has no part in a batch of
            a test gets a stand-in, which is not measured.

    Raises:
        ConfigError: the sampler has no values to go by.
        DataError: an epoch is too small to make one batch.

    Attributes:
        samples: positions in an epoch.
        key: where the set stands in the configuration.
    """

    is_stream = False

    def __init__(
        self,
        data: Data,
        *,
        train: bool,
        source: int,
        seed: int,
        device: torch.device,
        world_size: int = 1,
        rank: int = 0,
        key: str = "data",
        at_most: int | None = None,
        repeat: bool = False,
        in_step: bool = False,
    ) -> None:
        if data.first is None:
            data.open(seed, key)
        self._data = data
        self.key = key
        self._train = train
        self._source = source
        self._seed = seed
        self._device = device
        self._pinned = data.pins(device)
        self._repeat = repeat
        self._augment = chain(data.augment, data.views, key) if train else None
        self._epochs = Epochs(data, train=train, source=source, seed=seed, key=key)
        self.samples = self._epochs.samples
        self._plans = {
            first: BatchPlan(
                samples=self.samples,
                batch_size=size,
                micro_batch_size=data.micro_batch_size,
                accumulate=data.accumulate,
                drop_last=data.drop_last and train,
                world_size=world_size,
                rank=rank,
                stand_ins=train or in_step,
                at_most=at_most,
            )
            for first, size in data.sizes.items()
        }
        self._take_dataset()
        self._requests = _Requests()
        self._workers: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []

    @property
    def windows(self) -> int:
        """Batches in the first epoch."""
        return int(self.plan.windows)

    def window_again(self, epoch: int, index: int) -> Window:
        """A window, cut as :meth:`batches` cuts it from now on."""
        return self.plan_of(epoch).window(index)

    def has_pass(self, epoch: int) -> bool:
        """There is an epoch of this number; of a stream there may be none."""
        return True

    def batches(self, epoch: int, roll_backs: int, first: int) -> Iterator[tuple[Window, Any]]:
        """The micro-batches of ``epoch`` from window ``first`` on, each with its window.

        The second of the pair is a :class:`Batch`, or None where the collate function gave None.

        Raises:
            DataError: the workers ended before the plan did, or the dataset was made again and is
                not as long as before.
        """
        epoch = 1 if self._repeat else epoch
        if self._train and self._epochs.is_due(epoch):
            self._rebuild(epoch)
        if self._data.workers:
            return self._from_workers(epoch, roll_backs, first)
        return self._in_process(epoch, roll_backs, first)

    def beside(self) -> Loader:
        """Another loader of the same batches, which reads in this process.

        Neither moves the other: the epoch at hand goes on as if nobody else had read. The dataset
        at hand and what its sampler draws by are shared, since making them may take long.
        """
        other = copy.copy(self)
        other._data = dataclasses.replace(self._data, workers=0, pin_memory=None)
        other._data.first = self._data.first
        other._pinned = False
        other._epochs = self._epochs.beside(other._data)
        other._take_dataset()
        other._requests = _Requests()
        other._workers, other._processes, other._aside = None, [], None
        return other

    def state_dict(self, epoch: int, windows: int) -> dict[str, Any]:
        """Nothing: the position is a number, and is in the run's progress."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: see :meth:`state_dict`."""

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            workers.end(self._processes, self._let_go)

    def _let_go(self) -> None:
        self._workers = None

    def _rebuild(self, epoch: int) -> None:
        self.close()  # the workers have the dataset that was
        self._processes = []
        del self._reader, self._mix
        self._epochs.let_go()
        self._epochs.rebuild(epoch)
        self._take_dataset()

    def _take_dataset(self) -> None:
        data, dataset = self._data, self._epochs.dataset
        self._mix = dataset if isinstance(dataset, Mix) else None
        self._reader = Reader(dataset, data.collate, data.batch_transform, self.key)

    def _in_process(self, epoch: int, roll_backs: int, first: int) -> Iterator[tuple[Window, Any]]:
        for window, request in self._plan_requests(epoch, roll_backs, first):
            if self._reader.draws:
                with rng.alone:
                    self._aside = rng.HostGenerators()
                    try:
                        data = self._reader[request]
                    finally:
                        self.put_back()
            else:
                data = self._reader[request]
            yield window, self._batch(data, request)

    def _from_workers(
        self, epoch: int, roll_backs: int, first: int
    ) -> Iterator[tuple[Window, Any]]:
        asked = self._requests.begin(self._plan_requests(epoch, roll_backs, first))
        if self._workers is None:
            self._workers = self._start_workers()
        # Here, and not when the first batch is asked for: that wait may be interrupted by a
        # signal, and starting processes must not be.
        return self._receive(asked, workers.start(self._workers.__iter__, self._processes))

    def _receive(
        self, asked: deque[tuple[Window, Request]], iterator: Iterator[Any]
    ) -> Iterator[tuple[Window, Any]]:
        received = 0
        # Not `for data in ...`: the plan says when the epoch ends, the workers do not.
        while asked or not self._requests.exhausted:
            try:
                data = next(iterator)
            except StopIteration:
                raise DataError(
                    f"the workers ended after {received} micro-batches of the epoch, "
                    f"{len(asked)} were still to come"
                ) from None
            received += 1
            window, request = asked.popleft()
            yield window, self._batch(data, request)

    def _plan_requests(
        self, epoch: int, roll_backs: int, first: int
    ) -> Iterator[tuple[Window, Request]]:
        order, plan = self._epochs.order(epoch, roll_backs), self.plan_of(epoch)
        seeds = self._sample_seeds(epoch, roll_backs)
        for index in range(first, int(plan.windows)):
            window = plan.window(index)
            for piece in window.pieces:
                indices = order.slice(piece.start, piece.stop)
                key = piece.start if self._train else None
                if self._mix is None:
                    yield window, Request(indices, seeds[0], key, piece.weight)
                else:
                    within, sources = self._mix.split(indices)
                    yield window, Request(within, seeds[0], key, piece.weight, sources, seeds)

    def _sample_seeds(self, epoch: int, roll_backs: int) -> tuple[int, ...]:
        """For each source, what its samples' seeds begin with."""
        if not self._train:
            return (rng.mix(self._seed, rng.SAMPLE_TEST, self._source),)
        count = 1 if self._mix is None else len(self._mix.names)
        begin = rng.mix(self._seed, rng.SAMPLE_TRAIN)
        return tuple(rng.mix(begin, self._source + n, epoch, roll_backs) for n in range(count))

    def _batch(self, data: Any, request: Request) -> Batch | None:
        if data is None:
            return None
        data = self._moved(data)
        if self._augment is not None and request.first_key is not None:
            seeds = request.seeds or request.seed
            size = len(request.indices)
            keys = sample_keys(seeds, request.first_key, size, request.sources)
            data = self._augment(data, keys)
        return Batch(data, request.indices, request.weight, request.sources)

    def _start_workers(self) -> DataLoader[Any]:
        return DataLoader(
            self._reader,
            sampler=self._requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._data.workers,
            prefetch_factor=self._data.prefetch,
            pin_memory=self._pinned,
            persistent_workers=True,
            worker_init_fn=workers.prepare_worker,
            # Its own generator: making an iterator draws from it, and must not draw from ours.
            generator=torch.Generator().manual_seed(rng.mix(self._seed, rng.LOADER)),
        )


class _Requests(Sampler[Request]):
    """The requests of the epoch at hand; one object for all epochs, so that workers live on.

    The workers' look-ahead draws requests from here; what has been drawn and not yet received
    waits in ``asked``, with its window.
    """

    def __init__(self) -> None:
        self.exhausted = False
        self._planned: Iterator[tuple[Window, Request]] = iter(())
        self._asked: deque[tuple[Window, Request]] = deque()

    def begin(self, planned: Iterator[tuple[Window, Request]]) -> deque[tuple[Window, Request]]:
        """Hand out ``planned`` from now on; the queue of what has been asked for."""
        self.exhausted = False
        self._planned = planned
        self._asked = deque()
        return self._asked

    def __iter__(self) -> Iterator[Request]:
        for window, request in self._planned:
            self._asked.append((window, request))
            yield request
        self.exhausted = True


def _as_it_is(data: Any) -> Any:
    return data
