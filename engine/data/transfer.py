"""Moving a batch of any shape to the device, and to double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from phaseloop.engine import rng
from phaseloop.engine.trees import map_tensors


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``data`` with every tensor in it on ``device``; everything else is passed through.

    Goes through mappings, lists, tuples, named tuples, dataclasses and packed sequences. Another
    type that has a ``to(device)`` method of its own is moved by it.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    def move_other(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return map_tensors(move, data, move_other)


class Generator(Protocol):
    """Whoever knows the state of the device's generator: a backend."""

    def rng_state(self) -> dict[str, Any]: ...

    def set_rng_state(self, state: dict[str, Any]) -> None: ...


def by_function(
    move: Callable[[Any, torch.device], Any],
    data: Any,
    device: torch.device,
    generator: Generator | None = None,
) -> Any:
    """``move(data, device)``; where it is broken off, its draws have not been made.

    So the state between two steps stays whole, whatever the user's function draws.

    Args:
        generator: of the device; None: it has none.
    """
    host = rng.HostGenerators()
    on_device = {} if generator is None else generator.rng_state()
    try:
        return move(data, device)
    except BaseException:  # an error, or a signal
        host.put_back()
        if generator is not None:
            generator.set_rng_state(on_device)
        raise


def to_double(data: Any) -> Any:
    """``data`` with every floating-point tensor in it in double precision; goes as far as
    :func:`to_device`, but for types with a ``to(device)`` method of their own."""
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, data)
