"""Meters: what a phase measures over all its samples, on the device, read at its end.

Counts are int64 and sums float64, so that a thousand samples in bfloat16 still count a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.registry import register_meter
from phaseloop.engine.torch_metric import TorchMetric
from phaseloop.engine.trees import copied


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
        """The state's tensors that are added over processes, in place, before ``compute``."""


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


class MeterSet:
    """The meters of one phase kind: the mean loss, and those that the user named.

    Args:
        name: prefix of the metrics: the phase's name.
        meters: name to meter, or to a torchmetrics metric.
    """

    def __init__(self, name: str, meters: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.loss = Mean()
        self.parts: dict[str, Mean] = {}
        self.meters: dict[str, Meter] = {
            key: _as_meter(key, meter) for key, meter in (meters or {}).items()
        }
        self._updates = tuple(meter.update for meter in self.meters.values())
        self._device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        """Move all states to ``device``."""
        self._device = device
        for meter in self._all().values():
            meter.to(device)

    def update(self, loss: Tensor | None, weight: Tensor | float, output: Any, target: Any) -> None:
        """Take in a micro-batch: its mean loss over ``weight`` elements, output and target."""
        if loss is not None:
            self.loss.add(loss, weight)
        for update in self._updates:
            update(output, target)

    def add_parts(self, parts: Mapping[str, Tensor], weight: Tensor | float) -> None:
        """Take in named parts of the loss."""
        for name, value in parts.items():
            if name not in self.parts:
                self.parts[name] = Mean().to(self._device)
            self.parts[name].add(value.detach(), weight)

    def compute(self) -> dict[str, float]:
        """Metric name (``test/accuracy``) to value. Here the host waits for the device."""
        metrics: dict[str, float] = {}
        for key, meter in self._all().items():
            if key == "loss" and self._only_parts():
                continue
            value = meter.compute()
            if isinstance(value, Mapping):
                metrics.update(
                    {f"{self.name}/{key}/{k}": _number(key, v) for k, v in value.items()}
                )
            else:
                metrics[f"{self.name}/{key}"] = _number(key, value)
        return metrics

    def _only_parts(self) -> bool:
        """The step measured losses that make no sum: those of several optimizers, say."""
        return bool(self.parts) and not self.loss.state_dict()["weight"]

    @property
    def names(self) -> list[str]:
        """Names of the meters, without the phase's; one may report several metrics."""
        return ["loss", *self.meters]

    def direction(self, metric: str) -> bool | None:
        """Whether a higher value of ``metric`` is better; None when that is not known."""
        key, _, name = metric.removeprefix(f"{self.name}/").partition("/")
        meter = self._all().get(key)
        known: Any = meter.higher_is_better if meter is not None else None
        return known.get(name) if isinstance(known, Mapping) else known

    def reset(self) -> None:
        """Forget everything, in every meter."""
        for meter in self._all().values():
            meter.reset()
        self.parts.clear()

    def state_dict(self) -> dict[str, Any]:
        """States of all meters by name."""
        return {key: meter.state_dict() for key, meter in self._all().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the states back; a meter that the checkpoint does not know starts clean."""
        self.reset()
        for key in state:
            if key.startswith("loss/"):
                self.parts[key.removeprefix("loss/")] = Mean().to(self._device)
        for key, meter in self._all().items():
            if key in state:
                meter.load_state_dict(state[key])

    def put_aside(self) -> dict[str, Any]:
        """What :meth:`put_back` needs; a metric that gathers all samples is not copied whole."""
        return {
            key: meter.put_aside() if isinstance(meter, TorchMetric) else copied(meter.state_dict())
            for key, meter in self._all().items()
        }

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """As it was at :meth:`put_aside`; may be called again for the same ``kept``."""
        theirs = {key for key, meter in self.meters.items() if isinstance(meter, TorchMetric)}
        self.load_state_dict({key: copied(kept[key]) for key in kept if key not in theirs})
        for key, meter in self.meters.items():
            if isinstance(meter, TorchMetric):
                meter.put_back(kept[key])

    def _all(self) -> dict[str, Meter]:
        parts = {f"loss/{name}": mean for name, mean in self.parts.items()}
        return {"loss": self.loss, **parts, **self.meters}


def _number(key: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"meters.{key}",
            f"it reports {value.numel()} values at once; let it report one number (such as an "
            f"average over classes), or a mapping of names to numbers",
        )
    return float(value)


def _as_meter(key: str, meter: Any) -> Meter:
    if isinstance(meter, Meter):
        return meter
    if _is_torchmetric(meter):
        return TorchMetric(meter)
    raise ConfigError(
        f"meters.{key}",
        f"{type(meter).__name__} is neither a phaseloop meter nor a torchmetrics.Metric",
    )


def _is_torchmetric(meter: Any) -> bool:
    """Without importing torchmetrics, which takes a second, for those who do not use it."""
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(meter).__mro__)
