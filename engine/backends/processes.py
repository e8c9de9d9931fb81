"""Processes: what every backend of several processes shares: who is here, and what they tell.

A group of its own, on the host, carries what the processes say to one another; gradients have the
default group. So the device is never read for it, and nothing waits behind a gradient.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup, Store, Work

from phaseloop.engine.backends import joining
from phaseloop.engine.backends.devices import OnDevice, choose
from phaseloop.engine.backends.joining import Joining
from phaseloop.engine.backends.messages import by_type, in_messages, once, spread
from phaseloop.engine.backends.sockets import make_room
from phaseloop.engine.backends.waiting import explained
from phaseloop.engine.errors import ConfigError, PhaseloopError

log = logging.getLogger("phaseloop")

_LONG = {True: 10.0, False: 30.0}
"""Seconds after which the primary, and another, says that it waits for others at the start."""


class Processes(OnDevice):
    """Several processes, each with its own device; the base of ``ddp`` and ``fsdp``.

    Without a launcher (see :mod:`joining`) it is a world of one process, without any group.

    Args:
        device: ``auto`` (a GPU of its own for each process, where there are some), ``cpu`` or
            ``cuda``.
        timeout: seconds that a collective may take; a process that waits longer ends with an
            error.
        start_timeout: the same for the first updates and tests, which may compile and fill
            caches; see :class:`~phaseloop.engine.patience.Patience`.

    Raises:
        ConfigError: the device is none of these, a time is not positive, or there are fewer GPUs
            on this machine than processes.
    """

    def __init__(
        self, device: str = "auto", timeout: float = 300.0, start_timeout: float = 1800.0
    ) -> None:
        super().__init__()
        for name, value in (("timeout", timeout), ("start_timeout", start_timeout)):
            if value <= 0:
                raise ConfigError(f"backend.{name}", f"{value} s is no time; give more than 0")
        self.timeout = timeout
        self.start_timeout = start_timeout
        joined = joining.found()
        if joined is not None:
            self.rank, self.world_size = joined.rank, joined.world_size
        self.device = choose(device, None if joined is None else _number(joined))
        self._host: ProcessGroup | None = None
        self._meeting: Store | None = None
        self._failed = False
        self._patient = True

    # --- joining and leaving ---

    def setup(self) -> None:
        super().setup()
        if self.world_size == 1 or self._host is not None:
            return
        if dist.is_initialized():
            raise PhaseloopError(
                "torch.distributed is initialized already; let the backend do it, which ends it too"
            )
        with self._waiting():
            self._join()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """While the others are waited for; where that takes long, it is said, and for whom."""
        timer = threading.Timer(_LONG[self.primary], self._tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self) -> None:
        joined = joining.found()
        assert joined is not None
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        text = (
            f"rank {self.rank} waits for all {self.world_size} processes that {joined.by} started, "
            f"at {address}:{port}, {self.start_timeout:g} s at most (backend.start_timeout); a "
            f"process on its own is backend=single"
        )
        if self.primary:
            log.warning(text)
        else:  # has no folder yet to log in, and no console of its own
            print(text, file=sys.stderr, flush=True)

    def _join(self) -> None:
        make_room(self.world_size)
        kind = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        patience = timedelta(seconds=self.start_timeout)
        self._meeting = store = _meeting_place(self.rank, self.world_size, patience)
        dist.init_process_group(
            kind, store=store, timeout=patience, rank=self.rank, world_size=self.world_size
        )
        self._host = dist.new_group(backend="gloo", timeout=patience)

    def patient(self, on: bool) -> None:
        """Collectives from here on may take ``start_timeout``, or no longer than ``timeout``."""
        if self._host is None or self._failed or on == self._patient:
            return
        self._patient = on
        limit = timedelta(seconds=self.start_timeout if on else self.timeout)
        for group in (dist.group.WORLD, self._host):
            dist.distributed_c10d._set_pg_timeout(limit, group)

    def failed(self) -> None:
        """This process is on its way out with an error: it enters no collective any more."""
        self._failed = True

    def waited_in_vain(self, error: BaseException) -> str:
        if self._meeting is None or isinstance(error, PhaseloopError):
            return ""
        return explained(error, self._meeting, self.rank, self.world_size)

    def teardown(self) -> None:
        if self._host is None:
            return
        self._host = None
        if self._failed:
            return  # others may hang in a collective, and leaving in order would wait for them
        dist.destroy_process_group()

    def _group(self) -> ProcessGroup | None:
        """The group of the host; None: there is one process."""
        if self._failed and self.world_size > 1:
            raise PhaseloopError("this process has failed, and the others are not waited for")
        return self._host

    # --- what processes say to one another ---

    def sum_on_host(self, tensor: Tensor) -> Work | None:
        group = self._group()
        if group is None:
            return None
        work: Work = dist.all_reduce(tensor, group=group, async_op=True)
        return work

    def all_gather_object(self, value: Any) -> list[Any]:
        group = self._group()
        if group is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=group)
        return found

    def gather_object(self, value: Any) -> list[Any]:
        group = self._group()
        if group is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.gather_object(value, found if self.primary else None, dst=0, group=group)
        found[self.rank] = value
        return found

    def broadcast_object(self, value: Any) -> Any:
        group = self._group()
        if group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return value if self.primary else box[0]

    def barrier(self) -> None:
        group = self._group()
        if group is not None:
            dist.barrier(group=group)

    # --- on the device ---

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._group() is not None:
            dist.all_reduce(tensor)
        return tensor

    def gather_with_grad(self, tensor: Tensor) -> Tensor:
        if self._group() is None:
            return tensor
        rows = torch.zeros(self.world_size, dtype=torch.int64)
        rows[self.rank] = len(tensor)
        self.total_on_host(rows)
        gathered: Tensor = _Gathered.apply(tensor, rows.tolist(), self)  # type: ignore[no-untyped-call]
        return gathered

    def prepare_criterion(self, criterion: nn.Module) -> None:
        super().prepare_criterion(criterion)
        self._equalise(criterion)

    def _equalise(self, module: nn.Module) -> None:
        """Give every process the primary's parameters and buffers."""
        self.make_equal([parameter.data for parameter in module.parameters()])
        self.make_equal([*module.buffers()])

    @torch.no_grad()
    def make_equal(self, tensors: list[Tensor]) -> None:
        if self._group() is None:
            return
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                found.setdefault(tensor.device, []).append(once(tensor))
        for on_device in found.values():
            for pieces in in_messages(on_device):
                self._send(pieces)

    def _send(self, tensors: list[Tensor]) -> None:
        """The primary's values for tensors on one device, in one message."""
        types = by_type(tensors)
        # Larger elements first: so each begins at a place that its type may begin at.
        kinds = sorted(types, key=lambda kind: -kind.itemsize)
        parts = [torch.cat([t.detach().reshape(-1) for t in types[kind]]) for kind in kinds]
        # As bytes, since neither gloo nor nccl knows all types.
        sizes = [part.nbytes for part in parts]
        parts = [part.view(torch.uint8) for part in parts]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        dist.broadcast(message, src=0)
        if not self.primary:
            for kind, part in zip(kinds, torch.split(message, sizes), strict=True):
                spread(part.view(kind), types[kind])

    @torch.no_grad()
    def _average(self, parameters: list[nn.Parameter]) -> None:
        """In one message for each type; a process without a gradient adds zeros.

        A parameter that no process has a gradient for stays without one.
        """
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64)
        self.total_on_host(has)
        used = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for alike in by_type([_gradient(p) for p in used]).values():
            flat = torch.cat([gradient.reshape(-1) for gradient in alike])
            # Divided first, as torch's wrapper does: the sum of all may be too large for float16.
            spread(self.all_reduce(flat.div_(self.world_size)), alike)


def _number(joined: Joining) -> int:
    """Of this process among those that share its machine's GPUs."""
    # With --gpus-per-task each task sees its own GPU alone, and calls it 0.
    alone = joined.by == "slurm" and torch.cuda.device_count() == 1
    return 0 if alone else joined.local_rank


_store: list[Store] = []
_trainings = itertools.count()


def _meeting_place(rank: int, world_size: int, patience: timedelta) -> Store:
    """A part of the launcher's store that no earlier training of these processes has used.

    What that left there, torch would take for addresses of now.
    """
    if not _store:
        found = dist.rendezvous("env://", rank, world_size, timeout=patience)
        _store.append(next(iter(found))[0])
    # Torch's agent keeps its store over restarts, and in it the addresses of those that have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"phaseloop/{attempt}/{next(_trainings)}", _store[0])


class _Gathered(torch.autograd.Function):
    """The rows of all processes; a row's gradient is the sum of what all of them have for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], processes: Processes) -> Tensor:
        ctx.rows, ctx.processes = rows, processes
        padded = tensor.contiguous()
        if len(tensor) < max(rows):
            padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(found, padded)
        return torch.cat([one[:count] for one, count in zip(found, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, rank = ctx.rows, ctx.processes.rank
        total = ctx.processes.all_reduce(gradients[0].clone(memory_format=torch.contiguous_format))
        return total.narrow(0, sum(rows[:rank]), rows[rank]), None, None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
