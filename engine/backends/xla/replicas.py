"""Replicas: backend ``xla`` where ``torch_xla.launch`` has started several, with a device each.

On a TPU they are processes, on the CPU threads of one process. Whatever has a collective in it has
to be the same graph on all of them: numbers that differ are data on the device, and what differs in
its form is run before the collective, by itself.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, Store

from phaseloop.engine import outcomes
from phaseloop.engine.backends import joining
from phaseloop.engine.backends.collectives import check_norms
from phaseloop.engine.backends.host import Host
from phaseloop.engine.backends.joining import Joining
from phaseloop.engine.backends.messages import by_type, spread
from phaseloop.engine.backends.processes import Processes
from phaseloop.engine.backends.xla import lockstep
from phaseloop.engine.backends.xla.backend import OnXla
from phaseloop.engine.backends.xla.lockstep import Lockstep
from phaseloop.engine.backends.xla.threads import Threads
from phaseloop.engine.errors import ConfigError, PeerError
from phaseloop.engine.registry import register_backend

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

_here = HashStore()
"""Where the threads of this process find one another."""

_PORT = "12355"
"""Torch_xla's own, where nobody has set ``MASTER_PORT``: the same on all."""

_SYNCED = (
    "a SyncBatchNorm, and replicas of XLA would not hear of one another in it: with "
    "backend.spmd=true, or on one device, an ordinary BatchNorm sees the whole batch"
)

_mine = threading.local()
"""``trainings``: how many this replica has begun."""


@register_backend("xla")
class Xla(OnXla, Processes):
    """XLA: one device of this process, or one of several replicas, with their gradients averaged.

    Args:
        device: ``auto`` (what ``PJRT_DEVICE`` says, or a TPU, or else the CPU), ``cpu`` or
            ``tpu``.
        spmd: all devices of this process work on every batch, each on a part of it.
        devices: how many there are, with ``spmd``; see :mod:`phaseloop.engine.backends.xla.spmd`.
        shard: with ``spmd``, parameters are cut over the devices too.
        timeout: seconds that replicas wait for one another; one that waits longer ends with an
            error.
        start_timeout: the same for the first updates and tests, which compile.

    Raises:
        ConfigError: torch_xla is not there, or does not work; a time is not positive.
    """

    def __init__(
        self,
        device: str = "auto",
        spmd: bool = False,
        devices: int | None = None,
        shard: bool = False,
        timeout: float = 300.0,
        start_timeout: float = 1800.0,
    ) -> None:
        super().__init__(device, spmd, devices, shard, timeout=timeout, start_timeout=start_timeout)
        self._alike = self._open = False
        self._lockstep: Lockstep | None = None
        self._training = 0
        joined = joining.found()
        several = joined is not None and joined.world_size > 1
        # On one replica its tests are none of the others' business.
        self.collective_forward = self.hears_of_pieces = several
        # Asked, XLA starts: so only where it has.
        here = self.package.runtime.addressable_device_count() if several else 1
        self._threads = here > 1
        if self._threads and here != self.world_size:
            raise ConfigError(
                "backend",
                f"{self.world_size} replicas of XLA are threads of several processes, {here} in "
                f"each: they have to be all in one, or one in each",
            )
        self.draws_on_host = not self._threads or joined is None or joined.local_rank == 0

    def _choose(self, device: str, joined: Joining | None) -> torch.device:
        return torch.device("xla")  # the runtime knows which

    def check(self, task: Task) -> None:
        super().check(task)
        if self.world_size > 1:
            check_norms(task, _SYNCED)

    # --- joining and leaving ---

    def _meet(self) -> Store:
        if not self._threads:
            self._know_where()
            return super()._meet()
        self._training = getattr(_mine, "trainings", 0) + 1
        _mine.trainings = self._training
        store = PrefixStore(str(self._training), _here)
        store.set_timeout(timedelta(seconds=self.start_timeout))
        return store

    def _join(self, store: Store) -> None:
        if self._threads:
            self._lockstep = lockstep.of_training(
                self._training, self.world_size, self.start_timeout
            )

    def _talk(self, store: Store) -> Host:
        if self._lockstep is None:
            return super()._talk(store)
        host = Threads(self._lockstep, self.rank, self.world_size, self.start_timeout)
        host.barrier()
        return host

    def _leave(self) -> None:
        self._lockstep = None
        lockstep.let_go(self._training)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        if self._lockstep is not None:
            # The end of a process would close its connections, upon which the others end too.
            self._lockstep.abort(self.rank, error)
            self._lockstep = None

    def followed_from(self, error: BaseException) -> PeerError | None:
        if self._lockstep is None or not outcomes.is_lost(error):
            return None
        return self._lockstep.gone()

    def _know_where(self) -> None:
        """Of processes that a script started by ``torch_xla.launch`` nobody has said it.

        Then they meet as torch_xla's own ``xla://`` has them meet, by the same variables.
        """
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = self.package.runtime.get_master_ip()
        os.environ.setdefault("MASTER_PORT", _PORT)

    def _where(self) -> str:
        if self._threads:
            return "in one process"
        return super()._where() if "MASTER_ADDR" in os.environ else "at an address that XLA finds"

    # --- one step for all ---

    def begin_piece(self, alike: bool) -> None:
        self._alike = alike

    def mark_step(self) -> None:
        if self._lockstep is not None:
            # A thread of autograd's knows of no device of its own.
            self.package._XLAC._xla_set_default_device(str(self.device))
        super().mark_step()

    def _sync(self) -> None:
        self._alike = self._open = False
        if self._lockstep is None:
            super()._sync()
            return
        seconds = self.start_timeout if self._patient else self.timeout
        self._lockstep.run(self.primary, super()._sync, seconds)

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._open:
            self.mark_step()
        return super().to_host(tensors)

    def _apart(self) -> bool:
        """Before and after what all do together, where the rest may differ; whether it may."""
        if self._alike:
            self._open = True
            return False
        self.mark_step()
        return True

    # --- what is equal ---

    def prepare_model(self, model: nn.Module) -> nn.Module:
        super().prepare_model(model)
        self._equalise(model)
        return model

    def prepare_criterion(self, criterion: nn.Module) -> None:
        super().prepare_criterion(criterion)
        self._equalise(criterion)

    # --- collectives ---

    def _add(self, tensor: Tensor) -> None:
        apart = self._apart()
        # A list, since it is in place then.
        self._model_functions.all_reduce(self._model_functions.REDUCE_SUM, [tensor])
        if apart:
            self.mark_step()

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        self._alike = False  # the way back is another on each
        self.mark_step()
        # Else it is made of sums, which are another graph on each.
        rows = self._model_functions.all_gather(tensor.unsqueeze(0), pin_layout=False)
        self.mark_step()
        return list(rows)

    @torch.no_grad()
    def make_equal(self, tensors: list[Tensor]) -> None:
        if not self.host.alone and not self._alike:
            self.mark_step()
        super().make_equal(tensors)

    def _send_together(self, tensors: list[Tensor]) -> None:
        if self._alike and all(tensor.device.type == "xla" for tensor in tensors):
            self._send_within(tensors)
            return
        # By the host: bit by bit, and nothing is to be compiled. The primary takes them too, since
        # XLA has equal numbers once on a device: else its next step would be another graph.
        values = self.to_host(tensors) if self.primary else []
        for tensor, value in zip(tensors, self.broadcast_object(values), strict=True):
            tensor.copy_(value.to(tensor.device))

    def _send_within(self, tensors: list[Tensor]) -> None:
        """As a part of the step: the sum over all, of which the others add nothing."""
        mine = torch.tensor([self.primary]).to(self.device)  # no scalar: those are put together
        for kind, alike in by_type(tensors).items():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            if kind == torch.bool:
                flat = flat.to(torch.uint8)
            flat = torch.where(mine, flat, torch.zeros_like(flat))
            self._add(flat)
            spread(flat.to(kind), alike)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        if not self.host.alone:
            self._average(parameters)

    def _note_uneven(self) -> None:
        self._alike = False  # zeros there, which are another graph
