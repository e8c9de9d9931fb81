"""Giving: the windows of a pass through a stream, of which one is read ahead.

So the last is known as the last; of several processes none knows alone which that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from phaseloop.engine.data.augment import Augment, sample_keys
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.plan import Piece, Window
from phaseloop.engine.data.planned import Planned
from phaseloop.engine.data.stream_ends import count_left, mark_of
from phaseloop.engine.data.stream_faults import Wrong
from phaseloop.engine.data.stream_options import goes_on_by_itself
from phaseloop.engine.data.stream_plan import StreamPlan
from phaseloop.engine.data.stream_readers import Read, Readers
from phaseloop.engine.data.stream_state import Standing
from phaseloop.engine.errors import DataError


class Giving(Planned):
    """The part of a stream's loader that gives.

    Attributes:
        gave: a pass has given something.
        mark: of several processes, a number for the first micro-batch that was read in this one, of
            a stream that is not told its rank; 0: there is none.
    """

    _alone: bool
    _train: bool
    _at_most: int | None
    _readers: Readers
    _wrong: Wrong
    _augment: Augment | None
    _pass_seed: int

    def __init__(self) -> None:
        self.gave = False
        self.mark = 0
        self._asks_mark = False
        self._next: Read | None = None  # while the window before it is worked on
        self._standings: list[Standing] = []

    def why_empty(self) -> str:
        """Why this process has nothing of the stream."""
        return self._wrong.why_empty(self.gave)

    def _give(self, ahead: Read | None, plan: StreamPlan) -> Iterator[tuple[Window, Batch | None]]:
        now = ahead or self._readers.read()
        if now is None and (self._alone or self._train):
            raise DataError(self.why_empty())
        waits = not (self._alone or self._train)  # until the others have nothing left either
        before: Read | None = None
        while now is not None:
            standing = now.standing
            enough = self._at_most is not None and standing.windows >= self._at_most
            self._next = None if enough else self._readers.read()
            if not enough:
                self._wrong.check_length(standing, plan, ended=self._next is None)
            if not self.gave:
                self._wrong.check_state(standing)
                self._take_mark(now)
            self._standings, self.gave = [*self._standings[-1:], standing], True
            yield from self._micro_batches(now, plan)
            before, now = now if waits else None, self._next
        while waits:
            yield from self._stand_ins(before, plan)

    def _take_mark(self, read: Read) -> None:
        if self._asks_mark:
            self._asks_mark, self.mark = False, mark_of(read.collected[0][0])

    def _micro_batches(self, read: Read, plan: StreamPlan) -> Iterator[tuple[Window, Batch | None]]:
        size = sum(size for _, size in read.collected)
        last, ahead = self._next is None, None
        if not self._alone:
            ahead = 0 if self._next is None else sum(size for _, size in self._next.collected)
        window = plan.window_of(read.standing.samples - size, size, last, ahead)
        for number, piece in enumerate(window.pieces):
            # A stand-in is the first once more.
            data, _ = read.collected[number if piece.weight else 0]
            yield window, self._batch(data, piece)

    def _stand_ins(
        self, before: Read | None, plan: StreamPlan
    ) -> Iterator[tuple[Window, Batch | None]]:
        """A batch of a test in which this process has no part."""
        start = self._readers.samples
        window = plan.window_of(start, 0, last=True, ahead=0)
        for _ in window.pieces:
            batch = None
            if plan.stand_ins:
                if before is None:
                    raise DataError(self._wrong.why_no_stand_in(plan.rank))
                size = before.collected[0][1]
                batch = self._batch(before.collected[0][0], Piece(start - size, start, 0))
            yield window, batch

    def _batch(self, data: Any, piece: Piece) -> Batch | None:
        if data is None:
            return None
        data = self._moved(data)
        if self._augment is not None:
            size = piece.stop - piece.start
            data = self._augment(data, sample_keys(self._pass_seed, piece.start, size, None))
        return Batch(data, torch.arange(piece.start, piece.stop), piece.weight)

    def count_left(self) -> tuple[int, bool]:
        """Samples that this process has left in the pass at hand, and whether these are all.

        For that it is read to its end, within a second; but not a stream that goes on in the next
        pass from where it was.
        """
        return count_left(self._next, self._readers, not goes_on_by_itself(self._data.first))
