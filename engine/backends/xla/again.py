"""Again: a part of a model computed a second time in backward, as it was computed in forward.

What torch's checkpoint does for other devices: the device's generator and autocast as they were.
And a barrier: else XLA would see that it has computed all this before, and keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phaseloop.engine.errors import PhaseloopError


class Again:
    """Made when a forward begins.

    Args:
        model_functions: ``torch_xla.core.xla_model``.
        device: said at each call, since threads of autograd's know of no device of their own.
        module: whose forward it is.
        inputs: any tree.
    """

    def __init__(
        self, model_functions: Any, device: torch.device, module: nn.Module, inputs: Any
    ) -> None:
        self._functions = model_functions
        self._device = str(device)
        self._module = module
        self._inputs = _tensors(inputs)
        self._versions = [tensor._version for tensor in self._inputs]
        self._generator = model_functions.get_rng_state(self._device)
        self._autocast: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled("xla"),
            "dtype": torch.get_autocast_dtype("xla"),
        }
        self._gradients: list[Tensor] = []

    def computed(self, output: Any) -> Any:
        """To be called with what the forward gave; gives it back."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradients.append)  # type: ignore[no-untyped-call]
        return output

    @contextmanager
    def state(self) -> Iterator[None]:
        """In backward, around the second forward.

        It comes after the gradients of what the first one gave, and uses values behind the barrier:
        so XLA neither takes it for the first one nor does it early.

        Raises:
            PhaseloopError: an input was changed in place since.
        """
        if self._versions != [tensor._version for tensor in self._inputs]:
            raise PhaseloopError(
                f"model.checkpoint: an input of a {type(self._module).__name__} was changed in "
                f"place, by itself or since, and its backward computes with it again; leave this "
                f"module out"
            )
        parameters, buffers = self._module.parameters(), self._module.buffers()
        uses = [*self._inputs, *self._gradients, *parameters, *buffers]
        self._gradients = []
        there = {id(tensor): tensor for tensor in uses if tensor.device.type == "xla"}
        self._functions.optimization_barrier_([*there.values()])
        now = self._functions.get_rng_state(self._device)
        self._functions.set_rng_state(self._generator, self._device)
        try:
            with torch.autocast("xla", **self._autocast):
                yield
        finally:
            self._functions.set_rng_state(now, self._device)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
