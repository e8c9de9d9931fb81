"""Torch's processes: gradients and weights go by the default group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from phaseloop.engine.backends.processes import Processes
from phaseloop.engine.errors import PhaseloopError


class TorchProcesses(Processes):
    """Several processes with a group of torch's: gloo on the CPU, nccl on GPUs, tpu_dist on TPUs.

    The base of ``ddp`` and ``fsdp``.
    """

    def _join(self, store: Store) -> None:
        if dist.is_initialized():
            raise PhaseloopError(
                "torch.distributed is initialized already; let the backend do it, which ends it too"
            )
        dist.init_process_group(
            self.kind.group,
            store=PrefixStore("device", store),
            timeout=timedelta(seconds=self.start_timeout),
            rank=self.rank,
            world_size=self.world_size,
        )

    def _limit(self, seconds: float) -> None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)

    def _leave(self) -> None:
        dist.destroy_process_group()

    def _exit(self) -> None:
        super()._exit()
        if self.kind.group == "gloo" and dist.is_initialized():
            dist.destroy_process_group()

    def _add(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def _send(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor)
        return found
