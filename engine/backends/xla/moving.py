"""Moving modules to an XLA device in such a way that every parameter stays the same object.

``module.to(device)`` would put new ones into the module: optimizers made before would go on with
the old ones, and weights that are tied would be two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine import replica
from phaseloop.engine.errors import PhaseloopError


def move(module: nn.Module, device: torch.device) -> None:
    """Every parameter and buffer on the device, without gradients; what is shared stays shared.

    Raises:
        PhaseloopError: something holds on to a parameter, so that it cannot be moved.
    """
    for parameter in module.parameters():
        parameter.grad = None
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, so that its id lasts

    def to_device(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor, tensor.to(device)
        return moved[id(tensor)][1]

    try:
        with _swapping():
            module._apply(to_device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        cause = error.__cause__ or error
        raise PhaseloopError(
            f"the model cannot be moved to an XLA device ({error}: {cause}): something holds on "
            f"to that parameter; make the model anew before the run"
        ) from error


@contextmanager
def _swapping() -> Iterator[None]:
    """Torch changes what a parameter holds, and not the parameter.

    That is one switch for the whole process, and replicas may be threads of it.
    """
    with replica.one_at_a_time:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


def move_state(optimizer: Optimizer) -> None:
    """What an optimizer has gathered before the run goes where its parameters are.

    Numbers, such as a count of steps, stay on the CPU, where torch keeps them.
    """
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim():
                entry[key] = value.to(parameter.device)
