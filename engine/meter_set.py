"""MeterSet: what a phase measures over all its samples, on all processes, read at its end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phaseloop.engine import meter_sync
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.meters import Mean, Meter
from phaseloop.engine.torch_metric import TorchMetric, is_torchmetric
from phaseloop.engine.trees import copied

if TYPE_CHECKING:
    from phaseloop.engine.backends.base import Backend


ToHost = Callable[[list[Tensor]], list[Tensor]]


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
        self.separate: Callable[[list[Tensor]], None] | None = None  # see Backend.separate
        self._updates = tuple(meter.update for meter in self.meters.values())
        self._device = torch.device("cpu")
        self._copies: dict[str, Any] = {}
        self._without_loss = False

    def to(self, device: torch.device) -> None:
        """Move all states to ``device``."""
        self._device = device
        for meter in self._all().values():
            meter.to(device)

    def update(self, loss: Tensor | None, weight: Tensor | float, output: Any, target: Any) -> None:
        """Take in a micro-batch: its mean loss over ``weight`` elements, output and target."""
        if loss is None:
            self._without_loss = True
        else:
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
        meters, make = self._all(), self._part
        if backend is not None and backend.lazy:
            meters, make = self._on_host(meters, backend.to_host), Mean
        if backend is None or backend.world_size == 1:
            return self._values(meters)
        with meter_sync.over_ranks(meters, make, backend) as everyones:
            values = self._values(everyones)
        agreed: dict[str, float] = backend.broadcast_object(values)
        return agreed

    def _on_host(self, meters: Mapping[str, Any], to_host: ToHost) -> dict[str, Any]:
        """The meters, or copies on the CPU of those that a lazy device has, after one wait.

        So no program of the device is made for it: it would be another at each phase, since what
        a curve has gathered is never as long again.
        """
        states = {key: meter.state_dict() for key, meter in meters.items()}
        found = dict(meters)
        for key, state in _fetched(states, to_host).items():
            if _on_device(states[key], self._device):
                if key not in self._copies:
                    self._copies[key] = copy.deepcopy(meters[key])
                    self._copies[key].to(torch.device("cpu"))
                found[key] = self._copies[key]
                found[key].load_state_dict(state)
        return found

    def _values(self, meters: Mapping[str, Any]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for key, meter in meters.items():
            if key == "loss" and self._no_loss(meters):
                continue
            value = meter.compute()
            if isinstance(value, Mapping):
                metrics.update(
                    {f"{self.name}/{key}/{k}": _number(key, v) for k, v in value.items()}
                )
            else:
                metrics[f"{self.name}/{key}"] = _number(key, value)
        return metrics

    def _no_loss(self, meters: Mapping[str, Any]) -> bool:
        """The step measured outputs alone, or losses that make no sum: of several optimizers."""
        alone = self._without_loss or len(meters) > 1
        return alone and not meters["loss"].state_dict()["weight"]

    def _part(self) -> Mean:
        mean: Mean = Mean().to(self._device)
        return mean

    @property
    def names(self) -> list[str]:
        """Names of the meters, without the phase's; one may report several metrics."""
        return ["loss", *self.meters]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics, with the phase's; of a meter of several, as far as it says."""
        found = []
        for key, meter in {"loss": self.loss, **self.meters}.items():
            parts = meter.higher_is_better
            nested = [f"{key}/{name}" for name in parts] if isinstance(parts, Mapping) else []
            found += [f"{self.name}/{name}" for name in nested or [key]]
        return found

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
        self._without_loss = False
        self._separate()

    def _separate(self) -> None:
        if self.separate is not None:
            self.separate(
                [
                    tensor
                    for meter in self._all().values()
                    for tensor in (
                        meter.tensors() if isinstance(meter, TorchMetric) else meter.summed()
                    )
                ]
            )

    def state_dict(self) -> dict[str, Any]:
        """States of all meters by name."""
        return {key: meter.state_dict() for key, meter in self._all().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the states back; a meter that the checkpoint does not know starts clean."""
        self._reset_for([state])
        for key, meter in self._all().items():
            if key in state:
                meter.load_state_dict(state[key])
        self._separate()

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


def _fetched(tree: Any, to_host: ToHost) -> Any:
    """The tree with all its tensors on the host, after one wait."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = iter(to_host([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
    here = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(here, spec)


def _on_device(tree: Any, device: torch.device) -> bool:
    """Whether any tensor in it is there."""
    leaves = pytree.tree_leaves(tree)
    return any(isinstance(leaf, Tensor) and leaf.device.type == device.type for leaf in leaves)


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
