"""The plan of a stream: how passes through it are cut, of which each process reads a share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phaseloop.engine.data.plan import BatchPlan, Piece, Window, cut


@dataclass(frozen=True)
class StreamPlan(BatchPlan):
    """How a pass is cut into windows, as far as that is known before.

    A batch is the windows that the processes read at a time, one each.

    Args:
        readers: workers of each process, which make windows of their part of the samples; parts of
            processes and of workers differ by one sample at most.
        all_of_it: the pass is over when every process has nothing left; otherwise as soon as one
            has nothing.
    """

    readers: int = 1
    all_of_it: bool = False

    @property
    def windows(self) -> int | float:
        """Number of batches in a pass; infinity where nobody knows."""
        windows: int | float = math.inf
        if self.samples is not None:
            choose = max if self.all_of_it else min
            windows = choose(self._windows_on(rank) for rank in range(self.world_size))
        return windows if self.at_most is None else min(windows, self.at_most)

    @property
    def own_windows(self) -> int:
        """What this process can read, of a stream with a length."""
        return self._windows_on(self.rank)

    def part(self, samples: int) -> int:
        """This process's part of so many samples: of a batch, or of a pass."""
        return _part(samples, self.world_size, self.rank)

    def shares(self, samples: int) -> list[int] | None:
        return None

    def window_of(
        self, start: int, size: int, last: bool = False, ahead: int | None = None
    ) -> Window:
        """The micro-batches of what this process has read of a batch, from position ``start`` on.

        Its ``samples`` are this process's until all have told theirs.

        Of several processes all make as many as the largest share of a whole batch takes. One
        that is short of some repeats its first, with weight 0, where there are stand-ins.
        """
        largest = size if self.world_size == 1 else _part(self.batch_size, self.world_size, 0)
        count = self._pieces(largest)
        cuts = [cut(start, start + size, min(count, size), i) for i in range(min(count, size))]
        pieces = [Piece(a, b, b - a) for a, b in cuts] or [Piece(start, start, 0)]
        if self.stand_ins:
            first = pieces[0]
            pieces += [Piece(first.start, first.stop, 0)] * (count - len(pieces))
        return Window(tuple(pieces), size, size, last, ahead)

    def _windows_on(self, rank: int) -> int:
        assert self.samples is not None
        windows, size = 0, _part(self.batch_size, self.world_size, rank)
        for reader in range(self.readers):
            part = _part(_part(self.samples, self.world_size, rank), self.readers, reader)
            full, rest = divmod(part, size)
            windows += full + (rest > 0 and not self.drop_last)
        return windows


def _part(samples: int, parts: int, index: int) -> int:
    first, last = cut(0, samples, parts, index)
    return last - first
