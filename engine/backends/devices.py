"""Devices: the CPU, or one GPU of this machine, with its generator and its memory."""

from __future__ import annotations

from typing import Any

import torch

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.errors import ConfigError


class OnDevice(Backend):
    """A backend whose process has one device of torch's own: the CPU or a GPU."""

    def setup(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def rng_state(self) -> dict[str, Any]:
        if self.device.type != "cuda":
            return {}
        return {"cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def seed_device(self, seed: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def free_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def choose(device: str, number: int | None = None) -> torch.device:
    """The device that ``backend.device`` means.

    Args:
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        number: of this process among those of its machine, where there are several: its GPU has
            that number, and so ``cuda:N`` is not allowed. None: one process, GPU 0 or N.

    Raises:
        ConfigError: it is none of these, or there is no such GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("backend.device", str(error).splitlines()[0]) from None
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cpu" and chosen.index):
        raise ConfigError("backend.device", f"{device!r} is not auto, cpu, cuda or cuda:N")
    if chosen.type == "cpu":
        return chosen
    if number is not None and chosen.index is not None:
        raise ConfigError(
            "backend.device",
            f"{device!r}: of several processes each takes the GPU of its own number; use cuda",
        )
    index = chosen.index if chosen.index is not None else number or 0
    count = torch.cuda.device_count()
    if index >= count:
        each = "" if number is None else f", and this is process {number} of this machine"
        raise ConfigError("backend.device", f"{device!r}: there are {count} GPUs here{each}")
    return torch.device("cuda", index)
