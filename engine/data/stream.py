"""Streams: the windows of a pass through an ``IterableDataset``, each known to be the last or not.

One window is read ahead, so that the last of a pass is known before it is given; what a checkpoint
gets is where the readers stood before that.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch

from phaseloop.engine import rng
from phaseloop.engine.data.augment import chain
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.plan import Window
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.stream_faults import Wrong
from phaseloop.engine.data.stream_giving import Giving
from phaseloop.engine.data.stream_options import check_shares
from phaseloop.engine.data.stream_plan import StreamPlan
from phaseloop.engine.data.stream_reader import Orders, Windows
from phaseloop.engine.data.stream_readers import Read, Readers
from phaseloop.engine.data.stream_state import Standing
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.log_file import ALIKE

log = logging.getLogger("phaseloop")


class StreamLoader(Giving):
    """Micro-batches of one stream, pass by pass; an epoch is a pass.

    Has what :class:`~phaseloop.engine.data.loader.Loader` has; arguments as there. Of several
    processes each reads its own share of every batch, from its own iterator.

    Attributes:
        samples: in a pass; None: the stream does not say.
        key: where the set stands in the configuration.
        used_up: a pass has given nothing, so no further one will.
    """

    is_stream = True

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
        super().__init__()
        if data.first is None:
            data.open(seed, key)
        self._data = data
        self.key = key
        self._train = train
        self._device = device
        self._repeat = repeat
        self._at_most = at_most
        self._pinned = data.pins(device)
        self._alone = world_size == 1
        check_shares(data, key, world_size)
        told = callable(getattr(data.first, "set_rank", None))
        if told:
            data.first.set_rank(rank, world_size)
        self._asks_mark = not (told or self._alone)
        self.samples = data.stream_length()
        drop_last = data.drop_last and train
        whole = StreamPlan(
            samples=self.samples,
            batch_size=1,
            micro_batch_size=data.micro_batch_size,
            accumulate=data.accumulate,
            drop_last=drop_last,
            world_size=world_size,
            rank=rank,
            stand_ins=train or in_step,
            at_most=at_most,
            readers=max(1, data.workers),
            all_of_it=not train,
        )
        plans = {
            first: dataclasses.replace(whole, batch_size=size) for first, size in data.sizes.items()
        }
        self._plans = dict(plans)
        limit = whole.part(data.limit) if isinstance(data.limit, int) else None
        self._orders = Orders(plans, limit, drop_last)
        self._augment = chain(data.augment, data.views, key) if train else None
        kind = rng.SAMPLE_TRAIN if train else rng.SAMPLE_TEST
        self._seed = seed = rng.mix(seed, kind, source, rank)
        self._source = Windows(
            data.first, data.collate, data.batch_transform, seed, key, self._orders
        )
        self._readers = Readers(
            self._source, data.workers, data.prefetch, self._pinned, stateful=train
        )
        self._wrong = Wrong(data, key, drop_last)
        self._begun: tuple[int, int] | None = None
        self._ahead: Read | None = None
        self.used_up = False

    # --- how passes are cut ---

    @property
    def windows(self) -> int | float:
        """Batches in the first epoch; infinity where nobody knows."""
        return self.plan.windows

    # --- passes ---

    def has_pass(self, epoch: int) -> bool:
        """The stream gives something in this epoch; its first window is read, and kept.

        Raises:
            DataError: it gives nothing in its first pass. Of several processes all are told, by
                :mod:`phaseloop.engine.sharing`.
        """
        if not self.used_up:
            self._begin(epoch, 0)
            self._ahead = self._readers.read()
            if self._ahead is None:
                if not self.gave and self._alone:
                    raise DataError(self.why_empty())
                self.used_up = True
        return not self.used_up

    def batches(
        self, epoch: int, roll_backs: int, first: int
    ) -> Iterator[tuple[Window, Batch | None]]:
        """The micro-batches of ``epoch`` from window ``first`` on, each with its window.

        The second of the pair is a :class:`Batch`, or None where the collate function gave None.

        Raises:
            DataError: there is nothing, or not as much as the stream's length says.
        """
        number = self._number(epoch)
        if first or self._ahead is None or self._begun != (number, 0):
            self._begin(epoch, first)
        ahead, self._ahead, self._begun = self._ahead, None, None
        self._pass_seed = rng.mix(self._seed, number)
        return self._give(ahead, self._plan(number))

    def _begin(self, epoch: int, first: int) -> None:
        number = self._number(epoch)
        start = self._standing(epoch, first) if first else None
        if first and start is None:
            raise DataError(f"{self.key}: nothing says where batch {first} of epoch {epoch} began")
        if start is not None and start.reads_again:
            log.warning(
                "%s.dataset: %s keeps no state (state_dict, load_state_dict), so %d samples are "
                "read again to come to where the run was",
                self.key,
                type(self._data.first).__name__,
                start.reads_again,
                extra=ALIKE,
            )
        self._standings = [] if start is None else [start]
        self._ahead, self._next, self._begun = None, None, (number, first)
        self._orders.tell(number, self.plan.largest)
        if self._readers.stateful:
            self._readers.begin(number, start)
        else:
            self._readers.begin(number, None)
            self._read_again(first)

    def _read_again(self, windows: int) -> None:
        """Go through so many windows of a pass whose readers were not asked where they stood."""
        while self._readers.windows < windows:
            if self._readers.read() is None:
                raise DataError(
                    f"{self.key}: {windows} batches were read before, and now the stream ends "
                    f"after {self._readers.windows}"
                )

    def window_again(self, epoch: int, index: int) -> Window:
        """The window at hand, cut as :meth:`batches` cuts it from now on."""
        before, behind = self._standing(epoch, index), self._standing(epoch, index + 1)
        assert behind is not None
        start = 0 if before is None else before.samples
        last = self._readers.over
        return self._plan(self._number(epoch)).window_of(start, behind.samples - start, last)

    def beside(self) -> StreamLoader:
        """Another loader of the same batches, which reads a copy of the stream in this process.

        Raises:
            ConfigError: the stream cannot be copied.
        """
        source = copy.copy(self._source)
        try:
            source.dataset = copy.deepcopy(source.dataset)
        except Exception as error:
            raise ConfigError(
                f"{self.key}.dataset",
                f"it has to be read beside the training, and this stream cannot be copied "
                f"({type(error).__name__}: {error})",
            ) from error
        other = copy.copy(self)
        other._orders = source.orders = self._orders.copy()
        other._source = source
        other._pinned = False
        other._readers = Readers(source, 0, 1, pinned=False, stateful=False)
        other._begun, other._ahead, other._next, other._standings = None, None, None, []
        other.gave = other.used_up = False
        return other

    def put_back(self) -> None:
        """Give this process its generators back, if they are still set for reading."""
        self._readers.put_back()

    def close(self) -> None:
        """End the worker processes."""
        self._readers.close()

    # --- where it stands ---

    def state_dict(self, epoch: int, windows: int) -> dict[str, Any]:
        """Where the stream stood when so many windows of an epoch had been given.

        At a pass's start that is nowhere: each begins afresh.
        """
        standing = self._standing(epoch, windows) if windows else None
        return {
            "workers": self._data.workers,
            "gave": self.gave,
            "used_up": self.used_up,
            "standing": None if standing is None else dataclasses.asdict(standing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin there.

        Raises:
            ConfigError: it was read by another number of workers.
        """
        if state["workers"] != self._data.workers:
            raise ConfigError(
                f"{self.key}.workers",
                f"{self._data.workers} now and {state['workers']} in the checkpoint: each worker "
                f"reads a stream for itself, so a run keeps their number",
            )
        self.used_up = state["used_up"]
        self.gave = state["gave"]
        self._standings = [] if state["standing"] is None else [Standing(**state["standing"])]

    def _plan(self, epoch: int) -> StreamPlan:
        plan = self.plan_of(epoch)
        assert isinstance(plan, StreamPlan)
        return plan

    def _standing(self, epoch: int, windows: int) -> Standing | None:
        place = (self._number(epoch), windows)
        return next((s for s in self._standings if (s.epoch, s.windows) == place), None)

    def _number(self, epoch: int) -> int:
        """What counts as the epoch: each may be the first again, and a test is like the others."""
        if not self._train:
            return 0
        return 1 if self._repeat else epoch
