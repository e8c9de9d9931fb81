"""TorchMetric: any metric of torchmetrics as a meter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phaseloop.engine import metric_states
from phaseloop.engine.metric_states import PartState
from phaseloop.engine.trees import copied


def is_torchmetric(meter: Any) -> bool:
    """Without importing torchmetrics, which takes a second, for those who do not use it."""
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(meter).__mro__)


class TorchMetric:
    """Any metric of torchmetrics as a meter: updated without computing, its states saved.

    Args:
        metric: a :class:`torchmetrics.Metric` or ``MetricCollection``; its own syncing over
            processes is not used.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self._is_collection = not hasattr(metric, "_update_count")
        self.higher_is_better: Any = (
            {name: part.higher_is_better for name, part in metric.items()}
            if self._is_collection
            else metric.higher_is_better
        )
        for part in self._parts():
            part.persistent(True)
            # Over processes the engine syncs: with one exchange for all meters, and though some
            # process saw nothing.
            part.sync_on_compute = part._to_sync = False

    def update(self, output: Any, target: Any) -> None:
        if isinstance(output, Tensor):
            output = output.detach()
        else:
            output = pytree.tree_map_only(Tensor, Tensor.detach, output)
        self.metric.update(output, target)

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()

    def to(self, device: torch.device) -> Any:
        self.metric.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        updates = [int(part._update_count) for part in self._parts()]
        return {"states": dict(self.metric.state_dict()), "updates": updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Copied, since torchmetrics goes on in the very tensors and lists that it is given.
        self.metric.load_state_dict(copy.deepcopy(state["states"]))
        for part, updates in zip(self._parts(), state["updates"], strict=True):
            part._update_count = updates
            part._computed = None

    def put_aside(self) -> tuple[dict[str, Any], list[list[Any]]]:
        """What :meth:`put_back` needs.

        Of a state that is a list, to which an update only appends, the list alone is new: copying
        what a curve has gathered so far, at each batch, would make a phase quadratic.
        """
        lists = [(part, name, getattr(part, name)) for part, name in self._list_states()]
        try:
            for part, name, _ in lists:
                setattr(part, name, [])
            rest = copied(self.state_dict())
        finally:
            for part, name, values in lists:
                setattr(part, name, values)
        return rest, [list(values) for _, _, values in lists]

    def put_back(self, kept: tuple[dict[str, Any], list[list[Any]]]) -> None:
        """As it was at :meth:`put_aside`; may be called again for the same ``kept``."""
        rest, lists = kept
        self.load_state_dict(rest)
        for (part, name), values in zip(self._list_states(), lists, strict=True):
            setattr(part, name, list(values))

    def _list_states(self) -> list[tuple[Any, str]]:
        """Metrics, those inside others too, and the names of their states that are lists."""
        return [
            (part, name)
            for part in self._parts()
            for name, default in part._defaults.items()
            if isinstance(default, list) and isinstance(getattr(part, name), list)
        ]

    def tensors(self) -> list[Tensor]:
        """The states that are no lists."""
        values = [getattr(part, name) for part in self._parts() for name in part._defaults]
        return [value for value in values if isinstance(value, Tensor)]

    def states(self) -> list[PartState]:
        """The states of all parts, nothing copied; for other processes."""
        return metric_states.read(self._parts())

    def reduced(
        self, states: Sequence[Sequence[PartState]], gather: Callable[..., list[Tensor]]
    ) -> AbstractContextManager[None]:
        """Within, the metric has what ``states``, by rank, reduce to; after it, its own again."""
        return metric_states.reduced(self._parts(), states, gather)

    def load_merged(self, states: Sequence[dict[str, Any]], key: str) -> None:
        """Go on from what several processes had seen together: their ``state_dict``, by rank.

        Raises:
            CheckpointError: a state has no reduction that could be gone on from; names ``key``.
        """
        read = []
        for state in states:
            self.load_state_dict(state)
            read.append(self.states())
        metric_states.merge(self._parts(), read, key)

    def summed(self) -> list[Tensor]:
        raise NotImplementedError("torchmetrics are synced by their own reductions")

    def _parts(self) -> list[Any]:
        """The single metrics, those inside others too; what a collection shares is up to date."""
        if self._is_collection:
            self.metric.values(copy_state=False)
        return [part for part in self.metric.modules() if hasattr(part, "_update_count")]
