"""Devices: the CPU, or one GPU or TPU of this machine, with its generator and its memory."""

from __future__ import annotations

from typing import Any

import torch

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.device_kinds import KINDS, Kind, kind_of
from phaseloop.engine.errors import ConfigError


class OnDevice(Backend):
    """A backend whose process has one device that torch works on eagerly: CPU, GPU or TPU."""

    @property
    def kind(self) -> Kind:
        """What the engine knows of such devices."""
        return kind_of(self.device)

    def setup(self) -> None:
        self.kind.use(self.device)

    def rng_state(self) -> dict[str, Any]:
        state = self.kind.rng_state(self.device)
        return {} if state is None else {self.device.type: state}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        if self.device.type in state:
            self.kind.set_rng_state(state[self.device.type], self.device)

    def seed_device(self, seed: int) -> None:
        self.kind.seed(seed)

    def memory(self) -> int:
        return self.kind.memory(self.device)

    def free_memory(self) -> None:
        self.kind.free_memory()


def choose(device: str, number: int | None = None) -> torch.device:
    """The device that ``backend.device`` means.

    Args:
        device: ``auto`` (a GPU where there is one, else the CPU), ``cpu``, ``cuda``, ``tpu``, or
            one of several: ``cuda:N``, ``tpu:N``.
        number: of this process among those of its machine, where there are several: its GPU has
            that number, and so ``cuda:N`` is not allowed. None: one process, GPU 0 or N.

    Raises:
        ConfigError: it is none of these, torch does not know such devices, or there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = KINDS.get(device.split(":")[0])
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        if kind is not None and kind.install and f"device string: {kind.name}" in problem:
            problem = f"{device!r}: torch knows no {kind.word} here; that takes {kind.install}"
        raise ConfigError("backend.device", problem) from None
    if kind is None or (kind.name == "cpu" and chosen.index):
        raise ConfigError(
            "backend.device", f"{device!r} is not auto, cpu, cuda, cuda:N, tpu or tpu:N"
        )
    if kind.name == "cpu":
        return chosen
    if number is not None and chosen.index is not None:
        raise ConfigError(
            "backend.device",
            f"{device!r}: of several processes each takes the {kind.word} of its own number; "
            f"use {kind.name}",
        )
    count = kind.count()
    index = chosen.index
    if index is None:
        index = kind.own(number or 0) if count else 0
    if index >= count:
        each = "" if number is None else f", and this is process {number} of this machine"
        raise ConfigError(
            "backend.device", f"{device!r}: there are {count} {kind.word}s here{each}"
        )
    return torch.device(kind.name, index)
