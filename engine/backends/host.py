"""Host: what processes say to one another, on the host, whatever carries their gradients.

The group is an object of its own, and none that torch.distributed knows of: so it is there beside
Horovod and XLA too, and for each of several threads. The device is never read for it, and nothing
waits behind a gradient.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroupGloo,
    Store,
)

from phaseloop.engine.errors import PhaseloopError


class Waited(Protocol):
    """What is under way."""

    def wait(self) -> Any:
        """Until it is done."""


class Host:
    """One process: all that it hears is what it says itself.

    Attributes:
        alone: there are no others.
    """

    alone: bool = True

    def sum(self, tensor: Tensor) -> Waited | None:
        """Begin to sum a tensor on the CPU over processes, in place; None: it is done."""
        return None

    def all_gather(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank."""
        return [value]

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank, on the primary; elsewhere None but for its own."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """``value`` of the primary."""
        return value

    def barrier(self) -> None:
        """Wait until every process is here."""

    def limit(self, seconds: float) -> None:
        """What is begun from here on may take so long, and is an error after that."""

    def close(self) -> None:
        """Nothing is said any more; waits for what is under way."""


class HostGroup(Host):
    """Several processes, over gloo.

    Args:
        store: that all of them reach; nobody else uses it.
        rank, world_size: of this process.
        seconds: that each of the calls may take.

    Raises:
        RuntimeError: another process is gone, or did not come in time; the calls too.
    """

    def __init__(self, store: Store, rank: int, world_size: int, seconds: float) -> None:
        self.alone = False
        self._rank = rank
        self._world_size = world_size
        self._group: Any = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=seconds))

    def limit(self, seconds: float) -> None:
        self._group._set_default_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        self._group = None

    def sum(self, tensor: Tensor) -> Waited | None:
        work: Waited = self._group.allreduce([tensor], AllreduceOptions())
        return work

    def barrier(self) -> None:
        self._group.barrier().wait()

    def all_gather(self, value: Any) -> list[Any]:
        data, sizes = self._packed(value)
        rows = [torch.empty_like(data) for _ in sizes]
        self._group.allgather([rows], [data]).wait()
        return _unpacked(rows, sizes)

    def gather(self, value: Any) -> list[Any]:
        data, sizes = self._packed(value)
        found: list[Any] = [None] * self._world_size
        options = GatherOptions()
        options.rootRank = 0
        if self._rank:
            self._group.gather([], [data], options).wait()
        else:
            rows = [torch.empty_like(data) for _ in sizes]
            self._group.gather([rows], [data], options).wait()
            found = _unpacked(rows, sizes)
        found[self._rank] = value
        return found

    def broadcast(self, value: Any) -> Any:
        data = _bytes(value) if not self._rank else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._send(size)
        if self._rank:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._send(data)
        return value if not self._rank else _value(data)

    def _send(self, tensor: Tensor) -> None:
        """The primary's values, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()

    def _packed(self, value: Any) -> tuple[Tensor, list[int]]:
        """As bytes, as many as the longest of all has; and by rank how many there are."""
        data = _bytes(value)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self._world_size)]
        self._group.allgather([sizes], [torch.tensor([data.numel()])]).wait()
        by_rank = [int(size) for size in sizes]
        padded = torch.zeros(max(by_rank), dtype=torch.uint8)
        padded[: data.numel()] = data
        return padded, by_rank


class Gone(Host):
    """What a process that has failed hears: the others may hang, and are not waited for.

    Args:
        before: kept, since to let go of a group waits for what is under way in it.

    Raises:
        PhaseloopError: by every call.
    """

    def __init__(self, before: Host) -> None:
        _left.append(before)

    def __getattribute__(self, name: str) -> Any:
        raise PhaseloopError("this process has failed, and the others are not waited for")


_left: list[Host] = []


def let_go() -> None:
    """Of what the processes that have failed have left: it waits for what is under way there.

    Its threads have to end before the interpreter does: one that wanted it then would abort all.
    """
    for host in _left:
        host.close()
    _left.clear()


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _unpacked(rows: list[Tensor], sizes: list[int]) -> list[Any]:
    return [_value(row[:size]) for row, size in zip(rows, sizes, strict=True)]
