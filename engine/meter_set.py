"""MeterSet: what a phase measures over all its samples, on all processes, read at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phaseloop.engine import meter_sync
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.meters import Mean, Meter
from phaseloop.engine.torch_metric import TorchMetric, is_torchmetric
from phaseloop.engine.trees import copied

if TYPE_CHECKING:
    from phaseloop.engine.backends.base import Backend


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
                self.parts[name] = self._part()
            self.parts[name].add(value.detach(), weight)

    def compute(self, backend: Backend | None = None) -> dict[str, float]:
        """Metric name (``test/accuracy``) to value. Here the host waits for the device.

        Args:
            backend: for the values over all its processes, which all have to come here and get
                the very same numbers; None: over this process alone.
        """
        if backend is None or backend.world_size == 1:
            return self._values(self._all())
        with meter_sync.over_ranks(self._all(), self._part, backend) as meters:
            values = self._values(meters)
        agreed: dict[str, float] = backend.broadcast_object(values)
        return agreed

    def _values(self, meters: Mapping[str, Any]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for key, meter in meters.items():
            if key == "loss" and _only_parts(meters):
                continue
            value = meter.compute()
            if isinstance(value, Mapping):
                metrics.update(
                    {f"{self.name}/{key}/{k}": _number(key, v) for k, v in value.items()}
                )
            else:
                metrics[f"{self.name}/{key}"] = _number(key, value)
        return metrics

    def _part(self) -> Mean:
        mean: Mean = Mean().to(self._device)
        return mean

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
        self._reset_for([state])
        for key, meter in self._all().items():
            if key in state:
                meter.load_state_dict(state[key])

    def load_merged(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what several processes had measured together; for one of those that resume.

        Args:
            states: the ``state_dict`` of each, by rank.

        Raises:
            CheckpointError: a metric of torchmetrics cannot be put together in mid-phase.
        """
        self._reset_for(states)
        meter_sync.merge(self._all(), states)

    def _reset_for(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Clean, with those parts of the loss that the states know."""
        self.reset()
        for key in dict.fromkeys(key for state in states for key in state):
            if key.startswith("loss/"):
                self.parts[key.removeprefix("loss/")] = self._part()

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


def _only_parts(meters: Mapping[str, Any]) -> bool:
    """The step measured losses that make no sum: those of several optimizers, say."""
    parts = any(key.startswith("loss/") for key in meters)
    return parts and not meters["loss"].state_dict()["weight"]


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
    if is_torchmetric(meter):
        return TorchMetric(meter)
    raise ConfigError(
        f"meters.{key}",
        f"{type(meter).__name__} is neither a phaseloop meter nor a torchmetrics.Metric",
    )
