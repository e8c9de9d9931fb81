"""Backend: what the engine asks of the machines it runs on, answered for one process.

One process needs no process group: every collective is an identity. A backend for several
processes overrides what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine.backends.host import Host, Waited
from phaseloop.engine.device_kinds import kind_of
from phaseloop.engine.errors import PeerError
from phaseloop.engine.marks import are_same, with_square

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class Again(Protocol):
    """The device's part in a forward that is computed a second time in backward."""

    def computed(self, output: Any) -> Any:
        """The first time it gave this; gives it back."""

    def state(self) -> AbstractContextManager[None]:
        """Around the second time: the device's state as it was at the first."""


class Backend:
    """One process on one device; the base of all backends.

    Attributes:
        device: of this process.
        rank: of this process.
        world_size: how many processes there are.
        host: what processes say to one another.
        shards: parameters, their gradients and averages are sharded over processes.
    """

    shards = False

    cuts_model = False
    """Of several processes each has a part of every parameter, its gradient and its state."""

    gradients_twice = True
    """Of several processes each has its gradients once more, in the messages that it sends."""

    lazy = False
    """Operations are only noted down, and done together at :meth:`mark_step`: what reads a value
    before that has everything done up to it, by itself."""

    place: Callable[[Any], Any] | None = None
    """What a batch on the device still needs: called with it, gives the batch."""

    collective_forward = False
    """Going through the model is a collective: every process has to, as often as the others."""

    draws_on_host = True
    """The host's global generators are this rank's; of threads in a process the first has them."""

    hears_of_pieces = False
    """:meth:`begin_piece` is called."""

    timeout = math.inf
    """Seconds that one process waits for another, once updates are made."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank = 0
        self.world_size = 1
        self.host = Host()

    @property
    def primary(self) -> bool:
        """This process writes the shared files and speaks to the console."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """What it computes on, without a number of its own: ``NVIDIA H200``."""
        return kind_of(self.device).model(self.device)

    # --- joining and leaving ---

    def check(self, task: Task) -> None:
        """Raises ConfigError for what the task asks for and cannot have here; no sample is read."""

    def setup(self) -> None:
        """Join the other processes; nothing where that is done."""

    def patient(self, on: bool) -> None:
        """Whether processes wait for one another as long as at the start, or less."""

    def failed(self, error: BaseException) -> None:
        """This process is on its way out with an error: it enters no collective any more."""

    def followed_from(self, error: BaseException) -> PeerError | None:
        """The error for it where it only follows from another's that is known; None: it is not."""
        return None

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

    def begin_piece(self, alike: bool) -> None:
        """A micro-batch of the training begins, on several processes; see ``hears_of_pieces``.

        Args:
            alike: until the step is over all compute the same, but for what the numbers are.
        """

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of a complete window over processes, where not yet done."""

    def check_weights(self) -> None:
        """Raises ConfigError where steps cannot give weights; asked once all processes give one."""

    def make_equal(self, tensors: list[Tensor]) -> None:
        """Give these tensors the primary's values, on every process, in place."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """One step of an optimizer."""
        optimizer.step()

    # --- the device ---

    def described(self) -> str:
        """The device for a reader: ``cuda:0 (NVIDIA H200)``."""
        name = self.device_name
        return name if name == self.device.type else f"{self.device} ({name})"

    def again(self, module: nn.Module, inputs: Any) -> Again | None:
        """A module's forward begins, which is computed again in backward.

        None: torch's checkpoint knows the device, and sees to it.
        """
        return None

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
        """Tell a lazy device that a step is over; called once a step where ``lazy`` is set."""

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """Their values on the CPU, after one wait; those that are there are given as they are."""
        return [tensor.cpu() for tensor in tensors]

    def separate(self, tensors: list[Tensor]) -> None:
        """On a lazy device: each gets memory of its own; equal numbers from the host share theirs.

        A program is another one where two of its inputs are one piece of memory.
        """

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

    def gather_all_with_grad(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """The same of several at once, in one message for each type.

        Args:
            tensors: as many on all processes, of the same types and shapes but for the rows, and
                the same of them with a gradient.
            rows: by rank, how many the tensors have there.
        """
        return list(tensors)

    # --- what processes say to one another, on the host ---

    def sum_on_host(self, tensor: Tensor) -> Waited | None:
        """Begin to sum a tensor on the CPU over processes, in place; None: it is done."""
        return self.host.sum(tensor)

    def total_on_host(self, tensor: Tensor) -> Tensor:
        """The same to its end: the tensor, summed."""
        if (work := self.sum_on_host(tensor)) is not None:
            work.wait()
        return tensor

    def same(self, number: int) -> bool:
        """Whether every process has this number, whose square is an int64; all wait for it."""
        total, squares = self.total_on_host(torch.tensor(with_square(number))).tolist()
        return are_same(total, squares, self.world_size)

    def all_gather_object(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank."""
        return self.host.all_gather(value)

    def gather_object(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank, on the primary; elsewhere None but for its own."""
        return self.host.gather(value)

    def broadcast_object(self, value: Any) -> Any:
        """``value`` of the primary."""
        return self.host.broadcast(value)

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.host.barrier()
