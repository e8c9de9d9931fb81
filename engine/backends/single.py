"""Backend ``single``: this process, on the CPU or one GPU, without a process group."""

from __future__ import annotations

from typing import Any

import torch

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.registry import register_backend


@register_backend("single")
class Single(Backend):
    """One process.

    Args:
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """

    def __init__(self, device: str = "auto") -> None:
        super().__init__()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise ConfigError("backend.device", str(error).splitlines()[0]) from None
        if self.device.type not in ("cpu", "cuda"):
            raise ConfigError("backend.device", f"{device!r} is not auto, cpu, cuda or cuda:N")
        if self.device.type == "cuda":
            self._check_gpu(device)

    def _check_gpu(self, device: str) -> None:
        count = torch.cuda.device_count()
        if self.device.index is None:
            self.device = torch.device("cuda", 0)
        if self.device.index >= count:
            raise ConfigError("backend.device", f"{device!r}: there are {count} GPUs here")

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
