"""Backend ``xla`` in one process: operations are noted down, compiled and run once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from phaseloop.engine import replica
from phaseloop.engine.backends import joining
from phaseloop.engine.backends.base import Backend
from phaseloop.engine.backends.xla import package
from phaseloop.engine.backends.xla.again import Again
from phaseloop.engine.backends.xla.batch_norm import correct
from phaseloop.engine.backends.xla.moving import move, move_state
from phaseloop.engine.backends.xla.spmd import Spmd
from phaseloop.engine.errors import ConfigError, PhaseloopError

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class OnXla(Backend):
    """One XLA device of this process, a TPU or the CPU; or all of its devices, by SPMD.

    Args:
        device: ``auto`` (what ``PJRT_DEVICE`` says, or a TPU, or else the CPU), ``cpu`` or
            ``tpu``.
        spmd: all devices work on every batch, each on a part of it.
        devices: how many there are, with ``spmd``; see :class:`~.spmd.Spmd`.
        shard: with ``spmd``, parameters are cut over the devices too, and with them their
            gradients and the optimizer's state.
        limits: time limits, where there are several processes.

    Attributes:
        package: the module ``torch_xla``.

    Raises:
        ConfigError: torch_xla is not there, or does not work; ``devices`` or ``shard`` without
            ``spmd``.
    """

    lazy = True

    def __init__(
        self,
        device: str = "auto",
        spmd: bool = False,
        devices: int | None = None,
        shard: bool = False,
        **limits: float,
    ) -> None:
        for name, given in (("devices", devices is not None), ("shard", shard)):
            if given and not spmd:
                raise ConfigError(
                    f"backend.{name}",
                    "one process has several devices by SPMD: set backend.spmd=true",
                )
        self.package = package.load(device)
        super().__init__(**limits)
        self.device = torch.device("xla")
        self._model_functions: Any = self.package.core.xla_model
        self._corrections: list[RemovableHandle] = []
        self.spmd = Spmd(self.package, devices) if spmd else None
        self._shard = shard
        if self.spmd is not None:
            self.place = self.spmd.place

    @property
    def device_name(self) -> str:
        """``xla:TPU``, ``xla:CPU`` or ``8 xla:TPU by SPMD``: each rounds in a way of its own."""
        name = f"xla:{self.package.runtime.device_type()}"
        return name if self.spmd is None else f"{self.spmd.devices} {name} by SPMD"

    def check(self, task: Task) -> None:
        if task.precision.name == "float16":
            raise ConfigError(
                "precision",
                "float16 needs a scaled loss, for which the device would be waited for in each "
                "step; with backend xla use bfloat16",
            )
        if task.model_options.compile:
            raise ConfigError(
                "model.compile", "backend xla compiles whole steps by itself; leave it out"
            )

    def setup(self) -> None:
        self._check_alone()
        if self.spmd is not None:
            self.spmd.start()
        elif self.package.runtime.is_spmd():
            raise ConfigError(
                "backend.spmd",
                "this process runs XLA by SPMD, and cannot change: start another one",
            )
        self.device = self.package.device()
        self._check_autograd()
        super().setup()

    def teardown(self) -> None:
        for handle in self._corrections:
            handle.remove()
        super().teardown()

    def _check_alone(self) -> None:
        """Raises ConfigError where others would train too and XLA would not know of them.

        It would say nothing: a sum over processes would be what this process has.
        """
        joined = joining.found()
        if joined is not None and joined.world_size > 1 and joined.by != joining.XLA:
            raise ConfigError(
                "backend",
                f"{joined.by} started this as one of {joined.world_size} processes, and torch_xla "
                f"hears nothing of the others: each would train for itself. It starts its "
                f"processes itself; start this command once on each machine",
            )
        if dist.is_available() and dist.is_initialized():
            processes = dist.get_world_size()
            # By SPMD there is one; asked, XLA would start before it is told of devices and of SPMD.
            replicas = 1 if self.spmd is not None else self.package.runtime.world_size()
            if processes != replicas:
                raise ConfigError(
                    "backend",
                    f"torch.distributed was told of {processes} processes, and XLA knows of "
                    f"{replicas}: each would train for itself. Leave init_process_group out",
                )

    def _check_autograd(self) -> None:
        """Raises PhaseloopError where torch counted its devices without those of XLA.

        It does so once, at the first backward of a process.
        """
        try:
            # One at a time: of two replicas that were first at once, one has failed here.
            with replica.one_at_a_time:
                torch.ones((), device=self.device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise PhaseloopError(
                "this process has called backward() before XLA was started, and torch has no place "
                "for another device any more: call torch_xla.device() before that"
            ) from error

    # --- the model ---

    def prepare_model(self, model: nn.Module) -> nn.Module:
        move(model, self.device)
        if self.spmd is not None and self._shard:
            self.spmd.cut_parameters(model)
        self._corrections = correct(model)
        return model

    def prepare_criterion(self, criterion: nn.Module) -> None:
        move(criterion, self.device)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        move_state(optimizer)
        return optimizer

    # --- the device ---

    def mark_step(self) -> None:
        """Compile what was noted down, unless it is known, and run it; nobody waits for it.

        The generator goes on as if it had not been called: so what is drawn does not depend on how
        often it is.
        """
        state = self._model_functions.get_rng_state()
        self._sync()
        self._model_functions.set_rng_state(state)

    def again(self, module: nn.Module, inputs: Any) -> Again:
        return Again(self._model_functions, self.device, module, inputs)

    def _sync(self) -> None:
        self.package.sync()

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        if not there:
            return tensors
        # As torch_xla's own `save` does: `cpu()` would wait for each of them by itself.
        fetched = iter(self.package._XLAC._xla_get_cpu_tensors(there))
        return [tensor if tensor.device.type == "cpu" else next(fetched) for tensor in tensors]

    def separate(self, tensors: list[Tensor]) -> None:
        there = [tensor for tensor in tensors if tensor.device.type == self.device.type]
        if there:
            self._model_functions.optimization_barrier_(there)

    def rng_state(self) -> dict[str, Any]:
        return {"xla": self._model_functions.get_rng_state()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        if "xla" in state:
            self._model_functions.set_rng_state(state["xla"])

    def seed_device(self, seed: int) -> None:
        self._model_functions.set_rng_state(seed)
