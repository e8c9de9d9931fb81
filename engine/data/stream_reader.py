"""Reading a stream: from the user's iterator to collated windows, and where in it a reader stands.

Sample number n of a reader has its random numbers from (seed, phase kind, source, epoch, rank,
worker, n): the generators are seeded before the stream is asked for it. So augmentation does not
depend on an interruption, nor on how a batch is cut.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from phaseloop.engine import rng
from phaseloop.engine.data import failed
from phaseloop.engine.data.places import placed
from phaseloop.engine.data.plan import cut
from phaseloop.engine.data.stream_plan import StreamPlan
from phaseloop.engine.errors import ConfigError, DataError

Collected = list[tuple[Any, int]]
"""The micro-batches of a window, each with its number of samples."""


def is_stream(dataset: Any) -> bool:
    """It is gone through, and not indexed."""
    return isinstance(dataset, IterableDataset)


def keeps_state(thing: Any) -> bool:
    """It can say where it stands, and be put there."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(thing, name, None)) for name in methods)


@dataclass(frozen=True)
class Order:
    """What a reader is told when a pass begins.

    Args:
        epoch: of the training; in a test 0, so that every test of a set is the same.
        plan: how the pass is cut.
        limit: samples of the pass, over all workers of this process; None: all.
        drop_last: leave out a last batch that is smaller.
    """

    epoch: int
    plan: StreamPlan
    limit: int | None
    drop_last: bool


class Windows(IterableDataset[Collected]):
    """The windows of a stream, as a worker makes them, or this process.

    Args:
        dataset: the user's stream.
        collate: list of samples to a batch; None: torch's.
        transform: called with a batch, gives another.
        seed: hash of all that a sample's seed depends on, but for epoch, worker and count.
        key: where the stream stands in the configuration.
        orders: gives the order for the pass that begins; called where the stream is read.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        transform: Callable[[Any], Any] | None,
        seed: int,
        key: str,
        orders: Callable[[], Order],
    ) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate
        self.transform = transform
        self.seed = seed
        self.key = key
        self.orders = orders
        self._initial: Any = None
        self._begun = False
        self.samples: Any = None  # the iterator of the pass before, or of this one

    def __iter__(self) -> Iterator[Collected]:
        return Pass(self, self.orders())

    def rewind(self) -> None:
        """Put the stream, if it can be put anywhere, to where it stood before its first pass.

        So a pass does not depend on those before it, which a new process has not made.
        """
        if not keeps_state(self.dataset):
            return
        if self._begun:
            self.dataset.load_state_dict(copy.deepcopy(self._initial))
            return
        try:
            self._initial = copy.deepcopy(self.dataset.state_dict())
        except Exception as error:
            raise DataError(
                f"{self.key}.dataset: {type(self.dataset).__name__}.state_dict() has to work "
                f"before the first pass too ({type(error).__name__}: {error})"
            ) from error
        self._begun = True


class Pass(Iterator[Collected]):
    """One reader's pass through a stream, from anywhere.

    torchdata's ``StatefulDataLoader`` keeps what :meth:`state_dict` says after every window, and
    gives it back to :meth:`load_state_dict` before the first.

    The stream is opened at the first window and not before, so that neither starting workers nor
    going back to where a run was interrupted holds up a signal.
    """

    def __init__(self, windows: Windows, order: Order) -> None:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._windows = windows
        self._worker = None if info is None else worker
        self._order = order
        self._limit = order.limit
        if order.limit is not None:
            first, last = cut(0, order.limit, workers, worker)
            self._limit = last - first
        self._seed = rng.mix(windows.seed, order.epoch, worker)
        self._count = 0  # samples that were read
        self._over = False  # one that has ended is not asked again: it might begin anew
        self._samples: Iterator[Any] | None = None
        self._start: dict[str, Any] = {"count": 0, "over": False, "stream": {}}

    # --- where it stands ---

    def state_dict(self) -> dict[str, Any]:
        """Samples read so far, and the stream's own states, of dataset and iterator.

        Copies: the stream goes on from here, and may change in place what it has given.
        """
        if self._samples is None:
            return self._start
        things: dict[str, Any] = {"iterator": self._samples}
        if self._windows.dataset is not self._samples:
            things["dataset"] = self._windows.dataset
        own = {n: copy.deepcopy(t.state_dict()) for n, t in things.items() if keeps_state(t)}
        return {"count": self._count, "over": self._over, "stream": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin there; what it takes is done at the first window."""
        self._start = state
        self._over = state["over"]

    # --- reading ---

    def __next__(self) -> Any:
        try:
            return self._next()
        except StopIteration:
            raise
        except Exception as error:
            failure = error
        order, key, count = self._order, self._windows.key, self._count
        facts = {"set": key, "epoch": order.epoch, "count": count, "worker": self._worker}
        where = f" in epoch {order.epoch}" if order.epoch else ""
        by = "" if self._worker is None else f" by worker {self._worker}"
        failed.note(failure, f"{key}{where}, after {count} samples{by}", **facts)
        # Nothing is asked of the stream any more, nor where it stands.
        self._samples, self._over = None, True
        return failed.hand_on(failure)

    def _next(self) -> Collected:
        if self._over:
            raise StopIteration
        if self._samples is None:
            try:
                self._open()
            except StopIteration as error:  # this too
                raise DataError(
                    f"{self._windows.key}: beginning a pass raised StopIteration: {error}"
                ) from error
        share = self._order.plan.part(self._order.plan.batch_size)
        samples = self._read(share)
        if not samples or (self._order.drop_last and len(samples) < share):
            raise StopIteration
        try:
            return self._collected(samples)
        except StopIteration as error:
            # It would pass for the stream's own end.
            raise DataError(
                f"{self._windows.key}: collating raised StopIteration: {error}"
            ) from error

    def _read(self, most: int) -> list[Any]:
        """The next so many samples; fewer at the end."""
        assert self._samples is not None
        if self._limit is not None:
            most = min(most, self._limit - self._count)
        samples = []
        for _ in range(most):
            rng.seed_host(rng.mix(self._seed, self._count))
            try:
                samples.append(next(self._samples))
            except StopIteration:
                self._over = True
                break
            self._count += 1
        return samples

    def _collected(self, samples: list[Any]) -> Collected:
        windows, begin = self._windows, self._count - len(samples)
        collected: Collected = []
        for piece in self._order.plan.window_of(begin, len(samples)).pieces:
            if not piece.weight:  # a repeat, for which nothing is made
                continue
            # As for other data: a micro-batch's draws are not those of its last sample.
            rng.seed_host(rng.mix(self._seed, piece.start, -1))
            batch = windows.collate(samples[piece.start - begin : piece.stop - begin])
            if windows.transform is not None and batch is not None:
                rng.seed_host(rng.mix(self._seed, piece.start, -2))
                try:
                    batch = windows.transform(batch)
                except (ConfigError, DataError) as error:
                    raise placed(error, windows.key) from error
            collected.append((batch, piece.weight))
        return collected

    def _open(self) -> None:
        """Make the user's iterator, and bring it to the sample where this pass is to begin."""
        windows, dataset, start = self._windows, self._windows.dataset, self._start
        rng.seed_host(rng.mix(self._seed, -3))
        windows.rewind()
        if self._order.epoch and callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(self._order.epoch)
        own = start["stream"]
        if "dataset" in own:
            dataset.load_state_dict(copy.deepcopy(own["dataset"]))
        samples: Any = iter(dataset)
        if "iterator" in own:
            samples.load_state_dict(copy.deepcopy(own["iterator"]))
        if start["count"] and not own and samples is windows.samples:
            raise DataError(
                f"{windows.key}.dataset: {type(dataset).__name__} has to be read again from the "
                f"pass's start, and its __iter__ gives the iterator that was read already: let it "
                f"make a new one, or let it have state_dict and load_state_dict"
            )
        self._samples = windows.samples = samples
        if own:
            self._count = start["count"]
        else:
            self._skip(start["count"])

    def _skip(self, count: int) -> None:
        """Read so many samples again, each with the seed it had: the stream cannot be put there."""
        read = sum(len(self._read(1)) for _ in range(count))
        if read < count:
            raise DataError(
                f"{self._windows.key}: {count} samples were read before the interruption, and now "
                f"the stream ends after {read}"
            )


class Orders:
    """Tells readers what the pass that begins is, in other processes too.

    Args:
        plans: how passes are cut, by the epoch from which on.
        limit, drop_last: see :class:`Order`.
    """

    def __init__(self, plans: Mapping[int, StreamPlan], limit: int | None, drop_last: bool) -> None:
        self._plans = dict(plans)
        self._limit = limit
        self._drop_last = drop_last
        # Shared with the workers, which outlive a pass: the epoch, and the most samples at once.
        self._told: Tensor = torch.zeros(2, dtype=torch.int64)
        self._told.share_memory_()  # type: ignore[no-untyped-call]

    def tell(self, epoch: int, largest: int | None) -> None:
        """What every reader that begins a pass from now on is told."""
        self._told[0], self._told[1] = epoch, largest or 0

    def __call__(self) -> Order:
        """In a reader: the pass that begins."""
        epoch, largest = self._told.tolist()
        plan = self._plans[max(first for first in self._plans if first <= max(epoch, 1))]
        plan = dataclasses.replace(plan, largest=largest or None)
        return Order(epoch, plan, self._limit, self._drop_last)

    def copy(self) -> Orders:
        """Others that are told by themselves."""
        return Orders(self._plans, self._limit, self._drop_last)
