"""Backend ``ddp``: several processes with a copy of the model each; gradients are averaged.

Torch's wrapper reduces while backward runs, for steps that go through the model as a whole. Other
steps run on the bare model, and their gradients are reduced in one message when the window is full.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phaseloop.engine.backends.torch_processes import TorchProcesses
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.registry import register_backend

_UNUSED = (
    "some parameters had no part in the loss of this micro-batch, so torch never reduced their "
    "gradients: set backend.find_unused_parameters=true, freeze what is not trained, or let the "
    "loss depend on every output"
)

_PASSED_BY = (
    "this step is registered with whole_model_forward=True, and has not gone through the model by "
    "task.forward(): the processes would each go a way of their own; leave the declaration out"
)


@register_backend("ddp")
class Ddp(TorchProcesses):
    """Distributed data parallel: gloo on the CPU, nccl on GPUs.

    Args:
        device, timeout, start_timeout: see :class:`~phaseloop.engine.backends.processes.Processes`.
        find_unused_parameters: parameters may have no part in a loss, others from step to step;
            costs a walk through the graph at each step.
        static_graph: the graph is the same at every step, which torch makes use of. Gradients are
            reduced at each micro-batch then, and not once a window: the first one that a wrapper
            sees has to be, and all windows are to be rounded alike.
        bucket_mb: gradients are reduced in messages of this many megabytes.
        sync_batch_norm: batch norms use the statistics of the whole batch, over all processes; on
            GPUs only, since torch has it there only.

    Raises:
        ConfigError: an option is out of range, or ``sync_batch_norm`` on the CPU.
    """

    def __init__(
        self,
        device: str = "auto",
        timeout: float = 300.0,
        start_timeout: float = 1800.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_mb: float = 25.0,
        sync_batch_norm: bool = False,
    ) -> None:
        super().__init__(device, timeout, start_timeout)
        if bucket_mb <= 0:
            raise ConfigError("backend.bucket_mb", f"{bucket_mb} is not more than 0")
        if sync_batch_norm and self.device.type != "cuda":
            raise ConfigError(
                "backend.sync_batch_norm", "torch has synchronised batch norm on GPUs only"
            )
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.bucket_mb = bucket_mb
        self.sync_batch_norm = sync_batch_norm
        self._wrapped: _Wrapper | None = None
        self._covered: set[int] = set()

    def prepare_model(self, model: nn.Module) -> nn.Module:
        if self.sync_batch_norm and self.world_size > 1:
            # In place: the names stay.
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        model.to(self.device)
        self._equalise(model)
        return model

    def unwrap(self) -> None:
        if self._wrapped is not None:
            # Now, and not when the collector comes by.
            self._wrapped._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._wrapped, self._covered = None, set()

    def wrap(self, model: nn.Module) -> nn.Module:
        self.unwrap()
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.world_size == 1 or not trained:
            return model
        with warnings.catch_warnings():
            # What is to come in its place, a later torch says, still sends the buffers once.
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = _Wrapper(
                model,
                broadcast_buffers=False,  # done once a window, for steps of every kind
                init_sync=False,
                bucket_cap_mb=self.bucket_mb,
                # A static graph tells it by itself.
                find_unused_parameters=self.find_unused_parameters and not self.static_graph,
                static_graph=self.static_graph,
            )
        self._covered = {id(p) for p in trained}
        return self._wrapped

    def sync_gradients(self, on: bool) -> None:
        if self._wrapped is not None:
            # What is an average already stays what it is when it is averaged again.
            self._wrapped.require_backward_grad_sync = on or self.static_graph
            self._wrapped.require_forward_param_sync = False  # a forward that reduces sets it

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        if self.world_size == 1:
            return
        if self._wrapped is not None:
            self._check_reduced(self._wrapped)
        rest = [p for p in parameters if id(p) not in self._covered]
        if rest:
            self._average(rest)

    def _check_reduced(self, wrapped: _Wrapper) -> None:
        """Raises where torch would say so at the next forward only: after the update."""
        if not wrapped.require_forward_param_sync:
            raise PhaseloopError(_PASSED_BY)
        try:
            wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise PhaseloopError(_UNUSED) from error


class _Wrapper(DistributedDataParallel):
    """Torch's wrapper with the same messages at every backward, the first one too.

    Torch's own makes its first backward in buckets of another order, and makes them anew by the
    order in which gradients came. gloo adds up the processes' numbers in an order that depends on
    their place in a message: so a wrapper that is new, as after a resume, would make other bits.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # From the parameters as they are listed; the guess that torch's first ones go by, too.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The last layer first, since its gradients come first."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:  # of which torch does it itself, and never again
            return parameters, sparse
        return parameters[::-1], sparse[::-1]
