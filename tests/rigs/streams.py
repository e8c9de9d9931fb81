"""Streams of R1's samples: with a state of their own, without, and of several bad kinds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from phaseloop import Data, register_dataset
from tests.rigs import r1


class Stream(IterableDataset[Any]):
    """R1's samples, each worker its part, in an order by the epoch; keeps no state.

    Args:
        count: samples in a pass.
        augment: add a random amount, drawn from all three generators.
        draws_order: the order is drawn from torch's generator when a pass begins.
    """

    def __init__(
        self, count: int = r1.SAMPLES, augment: bool = False, draws_order: bool = False
    ) -> None:
        self.count = count
        self.augment = augment
        self.draws_order = draws_order
        self.samples = r1.Samples(count, augment)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        if self.draws_order:
            order: list[int] = torch.randperm(self.count).tolist()
        else:
            order = [(7 * i + self.epoch) % self.count for i in range(self.count)]
        info = get_worker_info()
        return order if info is None else order[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[Any]:
        for index in self.order():
            yield self.samples[index]


@register_dataset("r1_stream")
class Stateful(Stream):
    """The same, which says where it stands: begins there once, and goes on from the start."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.position = 0
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        order, self.position, self.start = self.order(), self.start, 0
        while self.position < len(order):
            self.position += 1
            yield self.samples[order[self.position - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


@register_dataset("r1_shared")
class Shared(Stateful):
    """The same, of which each process reads its part: every n-th sample, or as many as is said.

    Args:
        counts: samples of each process, one after another in the order; None: every n-th.
    """

    def __init__(self, *args: Any, counts: tuple[int, ...] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts = counts
        self.rank, self.world_size = 0, 1

    def set_rank(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def order(self) -> list[int]:
        order = [(7 * i + self.epoch) % self.count for i in range(self.count)]
        if self.counts is None:
            order = order[self.rank :: self.world_size]
        else:
            first = sum(self.counts[: self.rank])
            order = order[first : first + self.counts[self.rank]]
        info = get_worker_info()
        return order if info is None else order[info.id :: info.num_workers]


class SharedPlain(Shared):
    """The same without a state."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class SharedWithLength(Shared):
    """The same, which says how long it is: ``claims``, by rank where there are several."""

    def __init__(self, count: int, claims: tuple[int, ...] | None = None, **options: Any) -> None:
        super().__init__(count, **options)
        self.claims = (count,) if claims is None else claims

    def __len__(self) -> int:
        return self.claims[self.rank % len(self.claims)]


class SharedOnce(Shared):
    """One process has samples in the first epoch only."""

    def __init__(self, *args: Any, once: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.once = once

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def order(self) -> list[int]:
        return [] if self.rank == self.once and self.epoch > 1 else super().order()


class Buffered(Stream):
    """Shuffles through a buffer, and keeps its state in its iterator."""

    def __iter__(self) -> Iterator[Any]:
        return _Buffer(self.samples, self.order())


class _Buffer(Iterator[Any]):
    def __init__(self, samples: r1.Samples, order: list[int]) -> None:
        self.samples = samples
        self.rest = order
        self.buffer: list[int] = []

    def __next__(self) -> Any:
        while self.rest and len(self.buffer) < 6:
            self.buffer.append(self.rest.pop(0))
        if not self.buffer:
            raise StopIteration
        index = self.buffer.pop(random.randrange(len(self.buffer)))
        return self.samples[index]

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest, "buffer": self.buffer}  # not copied: it changes later

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest, self.buffer = state["rest"], state["buffer"]


@register_dataset("r1_one_pass")
class OnePass(Stream):
    """Gives its samples once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.done = False

    def __iter__(self) -> Iterator[Any]:
        order = [] if self.done else self.order()
        self.done = True
        for index in order:
            yield self.samples[index]


class WithLength(Stream):
    """Says how long it is; ``claims`` may be wrong."""

    def __init__(self, count: int = r1.SAMPLES, claims: int | None = None) -> None:
        super().__init__(count)
        self.claims = count if claims is None else claims

    def __len__(self) -> int:
        return self.claims


class Slow(Stateful):
    """Stops for a long time before one sample, having made a file."""

    def __init__(self, at: int, mark: Path, epoch: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.mark, self.slow_epoch = at, mark, epoch

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            here = self.epoch == self.slow_epoch and self.position == self.at + 1
            if here and not self.mark.exists():
                self.mark.touch()
                time.sleep(60)
            yield sample


class NumpyState(Stateful):
    """Its state holds what a checkpoint cannot."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": np.int64(self.position)}


KINDS: dict[str, type[Stream]] = {"plain": Stream, "stateful": Stateful, "buffered": Buffered}


def data(kind: str, workers: int = 0, augment: bool = True, **options: Any) -> Data:
    """A stream as training data, in batches of 4."""
    return Data(KINDS[kind](augment=augment), r1.BATCH, workers=workers, **options)
