"""Kinds of device: all that the engine has to know of a CPU, a GPU or a TPU, in one place.

Everything else about a device goes through its tensors, which torch makes alike. A kind of device
that torch gets from elsewhere (its PrivateUse1) is one class and one row of ``KINDS`` more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


class Kind:
    """A kind of device, and the CPU itself: no generator but the host's, nothing to measure.

    Attributes:
        name: torch's for the type of such a device.
        word: ours for one of them.
        group: the process groups of ``torch.distributed`` for tensors on the host and on it.
        pins: a copy to it is quicker out of page-locked memory.
        caches: its allocator holds back memory that nobody uses.
        install: what torch needs to know such devices; None: it always does.
    """

    name = "cpu"
    word = "CPU"
    group = "gloo"
    pins = False
    caches = False
    install: str | None = None

    def count(self) -> int:
        """How many of them this process sees."""
        return 1

    def own(self, number: int) -> int:
        """Index of the device of a process.

        Args:
            number: of this process among those of its machine that share its devices.
        """
        return number

    def use(self, device: torch.device) -> None:
        """Make it this process's device for what names none."""

    def rng_state(self, device: torch.device) -> Tensor | None:
        """State of its generator; None: it has none of its own."""
        return None

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        """The reverse of :meth:`rng_state`."""

    def seed(self, seed: int) -> None:
        """Seed the generator of the device in use."""

    def wait(self, device: torch.device) -> None:
        """Until everything it was asked for is done."""

    def memory(self, device: torch.device) -> int:
        """Peak bytes allocated on it since the start; 0 where that is not known."""
        return 0

    def free_memory(self) -> None:
        """Give back what its allocator holds and nobody uses."""

    def readings(self, device: torch.device) -> dict[str, Callable[[], float]]:
        """What can be read of it at any time, without waiting for it, by name.

        Memory is in MiB, of this process: allocated, held in reserve, and the peak of the first.
        A reading may raise whatever the driver raises that does not know it.
        """
        return {}

    def model(self, device: torch.device) -> str:
        """What its maker calls it; for the CPU and devices that tell nothing, their type."""
        return device.type


class Cuda(Kind):
    """A GPU."""

    name = "cuda"
    word = "GPU"
    group = "cpu:gloo,cuda:nccl"
    pins = True
    caches = True

    def count(self) -> int:
        return torch.cuda.device_count()

    def use(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def rng_state(self, device: torch.device) -> Tensor | None:
        return torch.cuda.get_rng_state(device)

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state, device)

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def wait(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def memory(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def free_memory(self) -> None:
        torch.cuda.empty_cache()

    def readings(self, device: torch.device) -> dict[str, Callable[[], float]]:
        cuda = torch.cuda
        return {
            "memory_allocated_mb": lambda: cuda.memory_allocated(device) / MIB,
            "memory_reserved_mb": lambda: cuda.memory_reserved(device) / MIB,
            "memory_peak_mb": lambda: cuda.max_memory_allocated(device) / MIB,
            # These ask the driver, by the package nvidia-ml-py: percent, °C, watts.
            "utilization": lambda: float(cuda.utilization(device)),
            "temperature": lambda: float(cuda.temperature(device)),
            "power_w": lambda: cuda.power_draw(device) / 1000,
        }

    def model(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)


class Tpu(Kind):
    """A TPU by ``torch-tpu``, which makes it a device that works eagerly, like a GPU.

    Its module ``torch.tpu`` refuses callers outside torch for whatever ``torch.accelerator`` has,
    and only that is called there; the rest is asked of the module. Read from torch-tpu 0.2.0; there
    was no TPU to run it on.
    """

    name = "tpu"
    word = "TPU"
    group = "cpu:gloo,tpu:tpu_dist"
    caches = True
    install = "torch-tpu (pip install torch-tpu), and a TPU"

    @property
    def module(self) -> Any:
        """``torch.tpu``."""
        return torch.get_device_module(self.name)

    def count(self) -> int:
        # That of another accelerator, where torch knows one beside this.
        found = torch.accelerator.current_accelerator()
        return torch.accelerator.device_count() if found and found.type == self.name else 0

    def own(self, number: int) -> int:
        # Each process is bound to one from its start, and cannot take another.
        return torch.accelerator.current_device_index()

    def use(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def rng_state(self, device: torch.device) -> Tensor | None:
        state: Tensor = self._generator(device).get_state()
        return state

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self._generator(device).set_state(state)

    def seed(self, seed: int) -> None:
        self.module.manual_seed(seed)

    def wait(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def memory(self, device: torch.device) -> int:
        try:
            return torch.accelerator.max_memory_allocated(device)
        except RuntimeError:  # its allocator does not count
            return 0

    def free_memory(self) -> None:
        with contextlib.suppress(RuntimeError):  # its allocator does not know how
            torch.accelerator.empty_cache()

    def readings(self, device: torch.device) -> dict[str, Callable[[], float]]:
        accelerator = torch.accelerator
        return {
            "memory_allocated_mb": lambda: accelerator.memory_allocated(device) / MIB,
            "memory_reserved_mb": lambda: accelerator.memory_reserved(device) / MIB,
            "memory_peak_mb": lambda: accelerator.max_memory_allocated(device) / MIB,
        }

    def model(self, device: torch.device) -> str:
        return str(self.module.get_device_name(device))

    def _generator(self, device: torch.device) -> torch.Generator:
        # The module's get_rng_state is refused too from torch 2.13 on, which has nothing instead.
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        generator: torch.Generator = self.module.default_generators[index]
        return generator


KINDS = {kind.name: kind for kind in (Kind(), Cuda(), Tpu())}
"""By the type that ``torch.device`` has."""


def kind_of(device: torch.device) -> Kind:
    """Its kind; a type that is none of these, such as ``xla``, is no more to the engine than a CPU
    is: what else it needs, its backend does."""
    return KINDS.get(device.type, KINDS["cpu"])
