"""Backend: what the engine asks of the machines it runs on, answered for one process.

One process needs no process group: every collective is an identity. A backend for several
processes overrides what differs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed import Work


class Backend:
    """One process on one device; the base of all backends.

    Attributes:
        shards: parameters, their gradients and averages are sharded over processes.
    """

    shards = False

    collective_forward = False
    """Going through the model is a collective: every process has to, as often as the others."""

    timeout = math.inf
    """Seconds that one process waits for another, once updates are made."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank = 0
        self.world_size = 1

    @property
    def primary(self) -> bool:
        """This process writes the shared files and speaks to the console."""
        return self.rank == 0

    # --- joining and leaving ---

    def setup(self) -> None:
        """Join the other processes; nothing where that is done."""

    def patient(self, on: bool) -> None:
        """Whether processes wait for one another as long as at the start, or less."""

    def failed(self) -> None:
        """This process is on its way out with an error: it enters no collective any more."""

    def waited_in_vain(self, error: BaseException) -> str:
        """Whom this process waited for until a time limit, in a sentence; empty: nobody."""
        return ""

    def teardown(self) -> None:
        """Leave the other processes."""

    # --- the model and its gradients ---

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """The model on the device, with the same values on every process."""
        return model.to(self.device)

    def prepare_criterion(self, criterion: nn.Module) -> None:
        """A loss with parameters or buffers: on the device, with the same values everywhere."""
        criterion.to(self.device)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, wrapped where the backend needs it."""
        return optimizer

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as steps call it that go through it as a whole: it reduces gradients itself.

        Called again when other parameters are trained.
        """
        return model

    def unwrap(self) -> None:
        """Steps go through the bare model from now on."""

    def sync_gradients(self, on: bool) -> None:
        """Whether the next forward and backward of the wrapped model reduce gradients."""

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of a complete window over processes, where not yet done."""

    def make_equal(self, tensors: list[Tensor]) -> None:
        """Give these tensors the primary's values, on every process, in place."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """One step of an optimizer."""
        optimizer.step()

    # --- the device ---

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

    def mark_step(self) -> None:
        """Tell a lazy device that a step is over."""

    # --- collectives on the device ---

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        return tensor

    def gather_with_grad(self, tensor: Tensor) -> Tensor:
        """Concatenation over processes along the first dimension, with gradients.

        Each may have another number of rows, or none. Every process has to call it, and its
        backward too: what a process has no rows for is still a loss of it, of weight 0.
        """
        return tensor

    # --- what processes say to one another, on the host ---

    def sum_on_host(self, tensor: Tensor) -> Work | None:
        """Begin to sum a tensor on the CPU over processes, in place; None: it is done."""
        return None

    def total_on_host(self, tensor: Tensor) -> Tensor:
        """The same to its end: the tensor, summed."""
        if (work := self.sum_on_host(tensor)) is not None:
            work.wait()
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank."""
        return [value]

    def gather_object(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank, on the primary; elsewhere None but for its own."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """``value`` of the primary."""
        return value

    def barrier(self) -> None:
        """Wait until every process is here."""
