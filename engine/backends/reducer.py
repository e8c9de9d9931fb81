"""Reducer: averages gradients while backward runs, by the hooks of Horovod's own optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phaseloop.engine.backends.collectives import Collectives, check_dense

_NEVER = 1 << 30  # backward passes

_WIDER = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bfloat16: torch.float32,
}
"""Types that Horovod cannot add up, and those in which it does."""


class Reducer:
    """Averages gradients while backward runs, by the hooks of a Horovod optimizer.

    All of them have arrived when ``backward()`` returns. What is an average already stays what it
    is when it is averaged again, so a second backward does no harm.

    Args:
        backend: with which the processes tell which parameters have gradients.
        hvd: ``horovod.torch``.
        named: the trained parameters of the model, by name.
        half: a type of 16 bits that gradients travel in; None: their own.
    """

    def __init__(
        self,
        backend: Collectives,
        hvd: Any,
        named: Mapping[str, nn.Parameter],
        half: torch.dtype | None,
    ) -> None:
        self._backend = backend
        self._trained = list(named.values())
        self.covered = {id(p) for p in self._trained}
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._trained, lr=0.0),
            named_parameters=list(named.items()),
            compression=_Wire(half),
            # Divided first, as torch's wrapper does: the sum of all may be too large for float16.
            gradient_predivide_factor=float(backend.world_size),
        )
        self._on = True
        self._ended = self._begun = False
        # Torch's own hook for any of several remembers every backward for ever.
        self._hooks: list[Any] = [
            parameter.register_hook(self._begin)  # type: ignore[no-untyped-call]
            for parameter in self._trained
        ]
        self.switch(False)

    def remove(self) -> None:
        """No gradient is averaged any more."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer._grad_accs.clear()  # with which its own hooks go: it cannot remove them

    def switch(self, on: bool) -> None:
        """Whether the next backward is a window's last, which averages."""
        if on != self._on:
            self._on = on
            self._optimizer.set_backward_passes_per_step(1 if on else _NEVER)
        self._ended = self._begun = False

    def end(self) -> None:
        """The gradients are averages, also where this process had none; until the next switch."""
        if not self._ended:
            self._finish()
        self.switch(False)

    def _begin(self, _: Tensor) -> None:
        """A backward has reached a parameter, the first of them or another."""
        if self._on and not self._begun:
            self._begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Wait for all; a parameter that no process has a gradient for stays without one."""
        self._begun = False
        trained = self._trained
        check_dense(trained)
        has = torch.tensor([p.grad is not None for p in trained], dtype=torch.int64)
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # In the time limit all are here, so that Horovod, which has none, waits for nobody.
        self._backend.total_on_host(has)
        self._optimizer.synchronize()
        for parameter, count in zip(trained, has.tolist(), strict=True):
            if not count:
                parameter.grad = None
        self._ended = True


class _Wire:
    """Gradients in a form that Horovod can add up; what it calls a compression.

    Args:
        kind: in which those of more than 16 bits travel; None: in their own.
    """

    def __init__(self, kind: torch.dtype | None) -> None:
        self._kind = kind

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        sent = sendable(gradient)
        if self._kind is not None and sent.is_floating_point():
            sent = sent.to(self._kind)
        return sent, gradient

    def decompress(self, sent: Tensor, gradient: Tensor | None) -> Tensor:
        return sent if gradient is None else restore(gradient, sent)


def sendable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy: contiguous, and of a type that Horovod can add up."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)).contiguous()


def restore(tensor: Tensor, sent: Tensor) -> Tensor:
    """Write what came of :func:`sendable` into the tensor that it was made of."""
    if tensor.is_complex():
        sent = torch.view_as_complex(sent)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)
    return tensor
