"""Meters: what measures over all samples of a phase, on the device; the built-in ones.

Counts are int64 and sums float64, so that a thousand samples in bfloat16 still count a thousand.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.registry import register_meter


@runtime_checkable
class Meter(Protocol):
    """What the engine asks of a meter; every :class:`torchmetrics.Metric` is wrapped into one.

    ``higher_is_better`` tells best-keeping and early stopping the direction: True, False, or None
    where it is not known; of a meter that reports several values, a mapping of names to these.
    """

    higher_is_better: Any

    def update(self, output: Any, target: Any) -> None:
        """Take in one micro-batch; must not read a value from the device."""

    def compute(self) -> Any:
        """The value so far: a number or tensor of one element, or a mapping of names to them."""

    def reset(self) -> None:
        """Forget everything."""

    def to(self, device: torch.device) -> Any:
        """Move the state to the device."""

    def state_dict(self) -> dict[str, Any]:
        """Sums and counts, as tensors and plain Python."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse."""

    def summed(self) -> list[Tensor]:
        """The state's tensors that are added over processes, in place, before ``compute``.

        The same number, shapes and dtypes on all processes; put back afterwards.
        """


class _Sums:
    """Base of the built-in meters: named tensors that start at zero and add up over processes."""

    higher_is_better: bool | None = None

    def __init__(self, **sums: Tensor) -> None:
        self._sums = sums

    def reset(self) -> None:
        for tensor in self._sums.values():
            tensor.zero_()

    def to(self, device: torch.device) -> Any:
        self._sums = {name: tensor.to(device) for name, tensor in self._sums.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self._sums.items():
            tensor.copy_(state[name])

    def summed(self) -> list[Tensor]:
        return list(self._sums.values())


class Mean(_Sums):
    """Mean of a scalar over samples: sum(value * weight) / sum(weight). NaN before any sample."""

    higher_is_better: bool | None = False

    def __init__(self) -> None:
        super().__init__(
            total=torch.zeros((), dtype=torch.float64), weight=torch.zeros((), dtype=torch.float64)
        )

    def add(self, value: Tensor, weight: Tensor | float) -> None:
        """Take in the mean ``value``, a tensor of one element, over ``weight`` samples.

        A weight that is a tensor stays on the device.
        """
        if isinstance(weight, Tensor):
            self._sums["total"].add_(value.double() * weight)
            self._sums["weight"].add_(weight)
            return
        self._sums["total"].add_(value, alpha=weight)
        self._sums["weight"].add_(weight)

    def update(self, output: Any, target: Any) -> None:
        """Take in a tensor of values, one per sample: ``output`` of shape [B]."""
        self._sums["total"].add_(output.detach().sum(dtype=torch.float64))
        self._sums["weight"].add_(output.numel())

    def compute(self) -> Tensor:
        return self._sums["total"] / self._sums["weight"]


@register_meter("accuracy")
class Accuracy(_Sums):
    """Share of samples whose target is among the ``top_k`` largest outputs.

    ``update`` takes outputs of shape [B, C] and integer targets of shape [B]. Soft targets, shares
    of the classes of shape [B, C] as mixup makes them, count as their largest class.
    NaN before any sample.
    """

    higher_is_better = True

    def __init__(self, top_k: int = 1) -> None:
        if top_k < 1:
            raise ConfigError("meters.accuracy.top_k", f"{top_k} is less than 1")
        self.top_k = top_k
        super().__init__(
            correct=torch.zeros((), dtype=torch.int64), count=torch.zeros((), dtype=torch.int64)
        )

    def update(self, output: Tensor, target: Tensor) -> None:
        output = output.detach()
        if target.ndim != 1:
            target = _largest_class(output, target)
        if self.top_k == 1:
            hits = output.argmax(dim=1).eq(target)
        else:
            best = output.topk(self.top_k, dim=1).indices
            hits = best.eq(target.unsqueeze(1))
        self._sums["correct"].add_(hits.sum())
        self._sums["count"].add_(target.shape[0])

    def compute(self) -> Tensor:
        return self._sums["correct"].double() / self._sums["count"]


def _largest_class(output: Tensor, target: Tensor) -> Tensor:
    if target.ndim == 2 and target.shape == output.shape:
        return target.argmax(dim=1)
    raise ConfigError(
        "meters.accuracy",
        f"targets must be class numbers [B] or shares of the classes [B, C], not "
        f"{list(target.shape)} for outputs of {list(output.shape)}",
    )
