"""SPMD: several XLA devices in one process, each of which works on a part of every batch.

The program is that of one device. Batches are marked as cut along their first dimension, and XLA
makes of the program one for each device, with what they have to tell one another. A mark changes no
value: so parts need not be of one size, and a tensor that has no samples in it may be marked too.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from torch import Tensor, nn

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.trees import map_tensors

_CPUS = "CPU_NUM_DEVICES"


class Spmd:
    """All devices that this process can use, in a row.

    Args:
        package: ``torch_xla``.
        devices: how many there have to be. On the CPU there are as many as are asked for, of the
            same cores. None: all there are; on the CPU what ``CPU_NUM_DEVICES`` says.

    Attributes:
        devices: how many there are, once it is started.

    Raises:
        ConfigError: no such number.
    """

    def __init__(self, package: Any, devices: int | None) -> None:
        if devices is not None and devices < 1:
            raise ConfigError("backend.devices", f"{devices} is less than 1")
        self._package = package
        self._wanted = devices
        self._mesh: Any = None
        self.devices = devices or 1

    def start(self) -> None:
        """Tell XLA, before the first tensor is made there.

        Raises:
            ConfigError: there is another number of devices, or this process has used XLA without
                SPMD.
        """
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        bridge = self._package._XLAC
        if not runtime.is_spmd():
            if bridge._xla_get_spmd_config_is_locked():
                raise ConfigError(
                    "backend.spmd",
                    "this process has used XLA without SPMD, and cannot change: start another one",
                )
            if self._wanted is not None and not bridge._xla_runtime_is_initialized():
                os.environ[_CPUS] = str(self._wanted)  # read when XLA starts, and on the CPU only
            runtime.use_spmd()
        self.devices = found = runtime.global_runtime_device_count()
        if self._wanted not in (None, found):
            raise ConfigError(
                "backend.devices",
                f"{self._wanted} are asked for, and XLA has {found} of the type "
                f"{runtime.device_type()} in this process",
            )
        self._mesh = spmd.Mesh(np.arange(found), (found,), ("data",))

    def place(self, data: Any) -> Any:
        """A batch on the device, with every tensor in it cut along its first dimension."""
        return map_tensors(self._cut, data)

    def cut_parameters(self, model: nn.Module) -> None:
        """Each along its longest dimension; its gradient and the optimizer's state follow.

        As torch_xla's ``SpmdFullyShardedDataParallel`` does it, which would change all names.
        """
        for parameter in model.parameters():
            if parameter.dim():
                self._cut(parameter, parameter.shape.index(max(parameter.shape)))

    def _cut(self, tensor: Tensor, dimension: int = 0) -> Tensor:
        from torch_xla.distributed import spmd

        if tensor.dim() and tensor.numel() and tensor.device.type == "xla":
            parts: list[str | None] = [None] * tensor.dim()
            parts[dimension] = "data"
            spmd.mark_sharding(tensor, self._mesh, tuple(parts))
        return tensor
