"""Backend ``fsdp``: several processes that each hold a part of every parameter, by torch's FSDP2.

A unit of the model is gathered before it is used and let go of after that; its gradients are
averaged while backward runs, and each process keeps its part of them. So parameters, gradients and
optimizer state take the memory of one process divided by the number of processes.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from phaseloop.engine.backends.torch_processes import TorchProcesses
from phaseloop.engine.backends.units import KEY, roots_of, units_of
from phaseloop.engine.errors import ConfigError, listing
from phaseloop.engine.registry import register_backend
from phaseloop.engine.shards import is_shard

log = logging.getLogger("phaseloop")

_REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
_UNFUSED = ("Adagrad", "SGD")


@register_backend("fsdp")
class Fsdp(TorchProcesses):
    """Fully sharded data parallel: gloo on the CPU, nccl on GPUs.

    A parameter without dimensions cannot be cut: it is whole everywhere, as are buffers and the
    parameters of a criterion.

    Args:
        device, timeout, start_timeout: see :class:`~phaseloop.engine.backends.processes.Processes`.
        shard: patterns of the names of modules that are units of their own; none: see
            :func:`~phaseloop.engine.backends.units.units_of`.
        reshard_after_forward: let go of a unit after forward and gather it again for backward;
            False keeps it, which takes memory and saves messages; None: of all units but the
            last, which backward begins with.
        reduce_each: average the gradients after every micro-batch: more messages, and no whole
            gradients in memory between the micro-batches of a window.
        reduce_unused: parameters may have a part in the loss on some processes and none on
            others; one that has none anywhere then has a gradient of zero.

    Raises:
        ConfigError: an option is out of range.
    """

    cuts_model = True
    gradients_twice = False

    def __init__(
        self,
        device: str = "auto",
        timeout: float = 300.0,
        start_timeout: float = 1800.0,
        shard: list[str] | None = None,
        reshard_after_forward: bool | None = None,
        reduce_each: bool = False,
        reduce_unused: bool = False,
    ) -> None:
        super().__init__(device, timeout, start_timeout)
        if isinstance(shard, str) or not all(isinstance(p, str) for p in shard or []):
            raise ConfigError(KEY, f"{shard!r} is not a list of patterns")
        self.shard = list(shard or [])
        self.reshard_after_forward = reshard_after_forward
        self.reduce_each = reduce_each
        self.reduce_unused = reduce_unused
        self.shards = self.collective_forward = self.world_size > 1
        self._roots: list[Any] = []
        self._parts: list[Any] = []
        self._synced = True
        self._windows = False
        self._before: list[weakref.ref[nn.Parameter]] = []

    # --- the model ---

    def prepare_model(self, model: nn.Module) -> nn.Module:
        roots = roots_of(model)
        units = {name: units_of(root, self._patterns(name, roots)) for name, root in roots.items()}
        self._check(model)
        if self.world_size == 1:
            return model.to(self.device)
        self._before = [weakref.ref(p) for p in model.parameters() if p.dim()]
        self._give([*_kept_whole(model, roots), *model.buffers()])
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for name, root in roots.items():
            self._shard(root, units[name], mesh)
        self._say(model, units)
        return model

    def _give(self, tensors: list[Tensor]) -> None:
        """On the device, with the primary's values; in place, so that shared ones stay shared."""
        for tensor in tensors:
            if tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)
        self.make_equal([tensor.data for tensor in tensors])

    def _patterns(self, root: str, roots: dict[str, nn.Module]) -> list[str]:
        """Those of ``shard`` for one of several roots; the names of all begin with the root's."""
        if not root:
            return self.shard
        for pattern in self.shard:
            if not any(pattern.startswith(f"{name}.") for name in roots):
                raise ConfigError(
                    KEY,
                    f"{pattern!r}: the model has no forward, and its parts are units already; "
                    f"name what is in them: {listing([f'{name}.*' for name in roots])}",
                )
        return [p.removeprefix(f"{root}.") for p in self.shard if p.startswith(f"{root}.")]

    def _check(self, model: nn.Module) -> None:
        if self.reduce_unused:
            from torch.distributed.fsdp import FSDPModule

            if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                raise ConfigError(
                    "backend.reduce_unused",
                    f"torch {torch.__version__} cannot: it takes a newer one, such as 2.13",
                )
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ConfigError(
                    "model",
                    f"{name} is on torch's meta device, without values: make the model on the host",
                )
            if not parameter.is_contiguous():
                raise ConfigError(
                    "model.channels_last" if parameter.dim() == 4 else "model",
                    f"{name} is not contiguous in memory, and fsdp cuts it along its first "
                    f"dimension: only parameters in the ordinary layout can be sharded",
                )

    def _shard(self, root: nn.Module, units: dict[str, nn.Module], mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        kept = {parameter for parameter in root.parameters() if not parameter.dim()}
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": kept or None}
        if self.reshard_after_forward is not None:
            options["reshard_after_forward"] = self.reshard_after_forward
        for unit in [*units.values(), root]:
            # One after the other: the device never holds more than parts and one whole unit.
            self._give([p for p in unit.parameters() if p.dim() and not is_shard(p)])
            fully_shard(unit, **options)
        sharded: Any = root
        if self.reduce_unused:
            sharded.set_reduce_scatter_unused_params(True)
        # Now, and not at the first forward: a step may call a unit before it calls the root.
        sharded._get_fsdp_state()._lazy_init()
        root.register_forward_hook(self._after_forward)
        self._roots.append(sharded)
        self._parts += [sharded, *units.values()]

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)):
            self._let_go()

    def _let_go(self) -> None:
        """Of what is whole still; where it is in parts already, it stays so.

        A backward does it. Without one a unit would not see what its parameters are changed to: by
        an optimizer, to averages for a test, to be trained or not.
        """
        for part in self._parts:
            part.reshard()

    def _say(self, model: nn.Module, units: dict[str, dict[str, nn.Module]]) -> None:
        if not self.primary:
            return
        whole = [name for name, p in model.named_parameters() if not is_shard(p)]
        names = [".".join(filter(None, (root, unit))) for root in units for unit in units[root]]
        log.info(
            "fsdp        parameters in %d parts each, in %d units: %s and the rest%s",
            self.world_size,
            len(names) + len(self._roots),
            listing(sorted(names)) if names else "none by itself",
            f"; whole everywhere: {listing(whole)}" if whole else "",
        )

    # --- optimizers ---

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if not self.shards:
            return optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        old = {id(p) for ref in self._before if (p := ref()) is not None}
        if any(id(p) in old for p in held):
            raise ConfigError(
                "optimizer",
                "it was made for the whole parameters, before backend fsdp cut them: give a "
                "function of the model that makes it, such as "
                "lambda model: torch.optim.AdamW(model.parameters())",
            )
        kind = type(optimizer).__name__
        if type(optimizer).__module__.startswith("torch.optim"):
            if kind in _REFUSED:
                raise ConfigError(
                    "optimizer",
                    f"{kind} cannot work on parts of a parameter: use another one, or backend=ddp",
                )
            if kind in _UNFUSED and any(group.get("fused") for group in optimizer.param_groups):
                raise ConfigError("optimizer.fused", f"torch has no fused {kind} for sharded ones")
        return optimizer

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self._let_go()

    # --- gradients ---

    def wrap(self, model: nn.Module) -> nn.Module:
        self._windows = True
        return model

    def unwrap(self) -> None:
        self._windows = False

    def sync_gradients(self, on: bool) -> None:
        # A step of its own kind may have its last backward anywhere.
        on = on or self.reduce_each or not self._windows
        if on != self._synced:
            self._synced = on
            for root in self._roots:
                root.set_requires_gradient_sync(on)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        if self.world_size > 1 and (rest := [p for p in parameters if not is_shard(p)]):
            self._average(rest)


def _kept_whole(model: nn.Module, roots: dict[str, nn.Module]) -> list[nn.Parameter]:
    """What is not cut: without dimensions, or held by none of the roots."""
    cut = {p for root in roots.values() for p in root.parameters() if p.dim()}
    return [parameter for parameter in model.parameters() if parameter not in cut]
