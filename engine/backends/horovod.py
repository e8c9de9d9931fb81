"""Backend ``horovod``: several processes with a copy of the model each; Horovod carries tensors.

Gradients are averaged while backward runs by Horovod's own optimizer, for steps that go through the
model as a whole. It wraps none of the task's optimizers: it has one of its own over the same
parameters, which never steps. So the task's stay as they are: their names, state, schedules, hooks.
"""

from __future__ import annotations

import logging
import math
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import Store

from phaseloop.engine.backends import horovod_process, joining, processes, rendezvous
from phaseloop.engine.backends.collectives import check_norms
from phaseloop.engine.backends.processes import Processes
from phaseloop.engine.backends.reducer import Reducer, restore, sendable
from phaseloop.engine.backends.sockets import Sockets
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.registry import register_backend
from phaseloop.engine.run_folder import ONLY_FILE

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

COMPRESSIONS = ("none", "fp16", "bf16")

_LOOK = 1e-4  # seconds between two looks at what is under way
_INTERFACE = "HOROVOD_GLOO_IFACE"
_MORE_THAN_OURS = 60  # seconds: Horovod's own limits come after those of the backend
_SYNCED = (
    "a torch.nn.SyncBatchNorm, which knows the processes of torch.distributed only: here it would "
    "be a batch norm of each process alone. Use torch.nn.BatchNorm, or backend=ddp with "
    "backend.sync_batch_norm=true, on GPUs"
)
_WEIGHTED = (
    "is fp16, which has no numbers above 65,504, and this step calls backward() with a weight: "
    "gradients travel multiplied by it, and are divided by the sum of weights only then. Use bf16, "
    "which has the range of float32, or none"
)


@register_backend("horovod")
class Horovod(Processes):
    """Horovod, over gloo on the CPU.

    Args:
        device, timeout, start_timeout: see :class:`Processes`.
        compression: gradients travel as they are (``none``), or in 16 bits, ``fp16`` or ``bf16``.
            Those in bf16 are added up in float32, and not while backward runs.
        fusion_mb: gradients that are ready are put together in messages of so many megabytes; 0:
            each goes alone. None: as Horovod does with two processes; with more 0, since which
            are put together depends on time, and sums of three numbers on their place in a message:
            a resumed run would have other bits.

    Raises:
        ConfigError: horovod is missing or unfit, an option is out of range, or a launcher that is
            neither ours nor horovodrun has started this process.
    """

    gradients_twice = False  # one buffer of a fixed size takes them, some at a time

    def __init__(
        self,
        device: str = "auto",
        timeout: float = 300.0,
        start_timeout: float = 1800.0,
        compression: str = "none",
        fusion_mb: float | None = None,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise ConfigError(
                "backend.compression", f"{compression!r} is none of {', '.join(COMPRESSIONS)}"
            )
        if fusion_mb is not None and fusion_mb < 0:
            raise ConfigError("backend.fusion_mb", f"{fusion_mb} is less than 0")
        self._by = ""
        super().__init__(device, timeout, start_timeout)
        if not self._by:
            _check_mpi()
        self._hvd = horovod_process.package()
        self.compression = compression
        self.fusion_mb = fusion_mb
        self._seconds = start_timeout
        self._reducer: Reducer | None = None

    def _check_launcher(self, joined: joining.Joining) -> None:
        self._by = joined.by
        if joined.by not in (joining.PHASELOOP, joining.HOROVODRUN):
            raise ConfigError(
                "backend.name",
                f"{joined.by} started this process, of which Horovod knows nothing: each would be "
                f"alone; start with horovodrun or by backend.processes=N, or use backend=ddp",
            )

    # --- joining and leaving ---

    def _meet(self) -> Store:
        if self._by == joining.HOROVODRUN and not processes.stores:
            patience = timedelta(seconds=self.start_timeout)
            processes.stores.append(rendezvous.primarys_store(self.primary, patience))
            if _INTERFACE in os.environ:  # by which horovodrun has found the machines connected
                os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ[_INTERFACE])
        return super()._meet()

    def _where(self) -> str:
        return f"at {rendezvous.place()}" if self._by == joining.HOROVODRUN else super()._where()

    def _join(self, store: Store) -> None:
        hvd = self._hvd
        # All are here before Horovod looks for them: it has one limit for this and for later.
        if store.add("here", 1) == self.world_size:
            store.set("all", "")
        store.wait(["all"], timedelta(seconds=self.start_timeout))
        self._begin()
        if (hvd.rank(), hvd.size()) != (self.rank, self.world_size):
            raise PhaseloopError(
                f"Horovod has this process as rank {hvd.rank()} of {hvd.size()}, and its launcher "
                f"as rank {self.rank} of {self.world_size}"
            )

    def _begin(self) -> None:
        """Horovod, in this process."""
        joined = joining.found()
        assert joined is not None
        if self._by == joining.PHASELOOP:
            os.environ.update(horovod_process.place_of(joined))
            # What is said of lost connections is said by us.
            os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
        last = math.ceil(max(self.timeout, self.start_timeout)) + _MORE_THAN_OURS
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(last))
        horovod_process.begin(self._hvd, self.fusion_mb, self.world_size, self.timeout)

    def _connections(self) -> Sockets:
        return horovod_process.connections()  # it may be an earlier training that has made them

    def _limit(self, seconds: float) -> None:
        self._seconds = seconds

    def _leave(self) -> None:
        # Horovodrun ends all as soon as one leaves with a code: none does before all are ready.
        try:
            self.host.barrier()
        except RuntimeError as error:  # another has failed, which is said there, or is still busy
            log.info("leaving before all are ready: %s", error, extra=ONLY_FILE)

    def teardown(self) -> None:
        self.unwrap()
        super().teardown()

    # --- the model and its gradients ---

    def check(self, task: Task) -> None:
        super().check(task)
        if self.world_size > 1:
            check_norms(task, _SYNCED)

    def check_weights(self) -> None:
        if self.compression == "fp16":
            raise ConfigError("backend.compression", _WEIGHTED)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        self._equalise(model)
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        self.unwrap()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.world_size > 1 and named and self.compression != "bf16":
            half = torch.float16 if self.compression == "fp16" else None
            self._reducer = Reducer(self, self._hvd, named, half)
        return model

    def unwrap(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = None

    def sync_gradients(self, on: bool) -> None:
        if self._reducer is not None:
            self._reducer.switch(on)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        if self.world_size == 1:
            return
        covered: set[int] = set()
        if self._reducer is not None:
            covered = self._reducer.covered
            self._reducer.end()
        rest = [p for p in parameters if id(p) not in covered]
        if rest:
            self._average(rest)

    def _total(self, flat: Tensor) -> Tensor:
        if self.compression == "none" or not flat.is_floating_point():
            return super()._total(flat)
        if self.compression == "fp16":
            return flat.copy_(super()._total(flat.half()))
        return flat.copy_(self._total_of_halves(flat.bfloat16()))

    def _total_of_halves(self, flat: Tensor) -> Tensor:
        """The sum over processes of a tensor in bfloat16, rounded once.

        Each process adds up a part of it, in float32, and tells the others: as bits, since Horovod
        does not know the type. Twice the tensor's bytes leave each process, as with a sum of its.
        """
        size, count = self.world_size, flat.numel()
        parts = flat.new_zeros(size, -(-count // size))
        parts.view(-1)[:count] = flat
        bits = parts.view(torch.int16).reshape(-1)
        name = f"phaseloop.parts.{bits.numel()}"
        own, _ = self._ended(self._hvd.alltoall_async(bits, name=name))
        total = own.view(torch.bfloat16).view(size, -1).float().sum(0).bfloat16()
        return torch.cat(self._gather(total))[:count]

    # --- the three primitives ---

    def _add(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        sent = sendable(tensor)
        name = f"phaseloop.sum.{sent.dtype}.{sent.numel()}"
        self._ended(self._hvd.allreduce_async_(sent, op=self._hvd.Sum, name=name))
        restore(tensor, sent)

    def _send(self, tensor: Tensor) -> None:
        name = f"phaseloop.send.{tensor.numel()}"
        self._ended(self._hvd.broadcast_async_(tensor, root_rank=0, name=name))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        if not tensor.numel():
            return [torch.empty_like(tensor) for _ in range(self.world_size)]
        sent = tensor.detach().reshape(-1).view(torch.uint8)  # it does not know all types
        name = f"phaseloop.gather.{sent.numel()}"
        found = self._ended(self._hvd.allgather_async(sent[None], name=name))
        return [row.view(tensor.dtype).view(tensor.shape) for row in found]

    def _ended(self, handle: int) -> Any:
        """What comes of something that all processes do, within the time limit."""
        until = time.monotonic() + self._seconds
        while not self._hvd.poll(handle):
            if time.monotonic() > until:
                raise RuntimeError(f"Horovod: timed out after {self._seconds:g} s")
            time.sleep(_LOOK)
        return self._hvd.synchronize(handle)


def _check_mpi() -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") != "1":
            raise ConfigError(
                "backend.name",
                f"MPI started this process ({name}={os.environ[name]}), and processes are found by "
                f"Gloo only: start with horovodrun --gloo, or with backend.processes=N",
            )
