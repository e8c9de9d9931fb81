"""Backend: what the engine asks of the machines it runs on, answered for one process.

One process needs no process group: every collective is an identity. A backend for several
processes overrides what differs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Backend:
    """One process on one device; the base of all backends.

    Attributes:
        shards: parameters, their gradients and averages are sharded over processes.
    """

    shards = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank = 0
        self.world_size = 1

    @property
    def primary(self) -> bool:
        """This process writes the shared files and speaks to the console."""
        return self.rank == 0

    def setup(self) -> None:
        """Join the other processes and choose the device."""

    def teardown(self) -> None:
        """Leave the other processes."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """The model on the device, wrapped where gradients are reduced by a wrapper."""
        return model.to(self.device)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, wrapped where the backend needs it."""
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward adds gradients without reducing them."""
        return nullcontext()

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of a complete window over processes, where not yet done."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """One step of an optimizer."""
        optimizer.step()

    def rng_state(self) -> dict[str, Any]:
        """State of the device's generator, for a checkpoint."""
        return {}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`rng_state`."""

    def seed_device(self, seed: int) -> None:
        """Seed the device's generator."""

    def memory(self) -> int:
        """Peak bytes allocated on the device since the start; 0 where that is not known."""
        return 0

    def free_memory(self) -> None:
        """Give back what the device's allocator holds and nobody uses."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        return tensor

    def gather_with_grad(self, tensor: Tensor) -> Tensor:
        """Concatenation over processes along the first dimension, with gradients."""
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """``value`` of the primary."""
        return value

    def barrier(self) -> None:
        """Wait until every process is here."""

    def mark_step(self) -> None:
        """Tell a lazy device that a step is over."""
