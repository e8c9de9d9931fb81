"""Backend ``single``: this process, on the CPU, one GPU or one TPU, without a process group."""

from __future__ import annotations

from phaseloop.engine.backends.devices import OnDevice, choose
from phaseloop.engine.registry import register_backend


@register_backend("single")
class Single(OnDevice):
    """One process.

    Args:
        device: ``auto`` (a GPU where there is one, else the CPU), ``cpu``, ``cuda``, ``cuda:N``,
            ``tpu`` or ``tpu:N``.

    Raises:
        ConfigError: a GPU or TPU is asked for and there is none.
    """

    def __init__(self, device: str = "auto") -> None:
        super().__init__()
        self.device = choose(device)
