"""The batch plan: which positions of an epoch make which update, on which process, in which piece.

A batch is a slice of the epoch's order. It is cut into one share per process, each share into the
same number K of consecutive micro-batches. Neither cut changes the update: what a micro-batch
contributes is weighted by its number of samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one process: positions start to stop-1 of the epoch's order.

    Attributes:
        weight: samples that count: ``stop - start``, or 0 for a stand-in that only keeps this
            process in step with the others; of a test, that may be no sample at all.
    """

    start: int
    stop: int
    weight: int


@dataclass(frozen=True)
class Window:
    """The micro-batches of one batch on one process.

    Attributes:
        samples: of the batch, over all processes.
        share: how many of them are this process's.
        last: of a stream, nothing comes after it in the pass; otherwise the plan says so.
        ahead: of a stream on several processes, samples that this one has for the window after
            this; None: the plan knows.
    """

    pieces: tuple[Piece, ...]
    samples: int
    share: int
    last: bool = False
    ahead: int | None = None


def cut(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part ``index`` of start..stop, cut into parts whose sizes differ by 1 at most."""
    size, larger = divmod(stop - start, parts)
    first = start + index * size + min(index, larger)
    return first, first + size + (index < larger)


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is cut into windows.

    Args:
        samples: samples in the epoch; None: of a stream that does not say.
        batch_size: samples per update, over all processes.
        micro_batch_size: samples that go through the model at once on one process; None: the
            whole share.
        accumulate: the same as a number of micro-batches; a share of fewer samples makes fewer.
        drop_last: leave out a last batch that is smaller than ``batch_size``.
        world_size: number of processes.
        rank: which of them this is.
        stand_ins: give a process that is short of a micro-batch the batch's first sample with
            weight 0, so that all make the same number of passes; otherwise it gets nothing: with no
            part in the batch at all, one empty micro-batch.
        at_most: leave out all batches but the first so many.
        largest: more samples than this never go through the model at once, whatever the two say.
    """

    samples: int | None
    batch_size: int
    micro_batch_size: int | None = None
    accumulate: int | None = None
    drop_last: bool = False
    world_size: int = 1
    rank: int = 0
    stand_ins: bool = True
    at_most: int | None = None
    largest: int | None = None

    @property
    def windows(self) -> int | float:
        """Number of batches in the epoch; infinity where nobody knows."""
        windows: int | float = math.inf
        if self.samples is not None:
            full, rest = divmod(self.samples, self.batch_size)
            windows = full + (rest > 0 and not self.drop_last)
        return windows if self.at_most is None else min(windows, self.at_most)

    @property
    def smallest(self) -> int:
        """Samples of the smallest batch; 1 where nobody knows."""
        if self.drop_last or not self.windows:
            return self.batch_size
        if self.samples is None:
            return 1
        return self.window(int(self.windows) - 1).samples

    def window(self, index: int) -> Window:
        """The micro-batches of this process in batch ``index``, counted from 0."""
        start = index * self.batch_size
        stop = start + self.batch_size
        if self.samples is not None:
            stop = min(stop, self.samples)
        largest = -(-(stop - start) // self.world_size)
        count = self._pieces(largest)
        whole = (start, stop)
        share = whole if self.world_size == 1 else cut(*whole, self.world_size, self.rank)
        pieces = []
        for i in range(count):
            first, last = cut(*share, count, i)
            if first < last:
                pieces.append(Piece(first, last, last - first))
            elif self.stand_ins:
                pieces.append(Piece(start, start + 1, 0))
        if not pieces:  # in a test, a process with no part in a batch has an empty step
            pieces.append(Piece(start, start, 0))
        return Window(tuple(pieces), stop - start, share[1] - share[0])

    def shares(self, samples: int) -> list[int] | None:
        """How many of a batch's ``samples`` are whose, by rank; None: only they know themselves."""
        parts = (cut(0, samples, self.world_size, rank) for rank in range(self.world_size))
        return [stop - start for start, stop in parts]

    def _pieces(self, share: int) -> int:
        """Into how many micro-batches the largest share is cut."""
        if self.accumulate is not None:
            pieces = min(self.accumulate, share)
        elif self.micro_batch_size is not None:
            pieces = -(-share // self.micro_batch_size)
        else:
            pieces = 1
        return pieces if self.largest is None else max(pieces, -(-share // self.largest))
