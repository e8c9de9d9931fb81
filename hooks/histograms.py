"""Hook ``histograms``: how the weights and the gradients are spread, by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from phaseloop.engine.cadence import Cadence
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("histograms")
class Histograms(Hook):
    """Records ``gradients/NAME``, before clipping, and ``weights/NAME``, after the update.

    Counted on the device, at chosen updates only; between them it costs three comparisons. The
    gradients are those of the whole batch: averaged over processes and, with float16, without the
    loss scale. Of sharded parameters (fsdp) each process counts its part.

    Args:
        every_updates: at every so many updates.
        every_epochs: at the first update of every so many epochs.
        parameters: patterns of parameters, or of modules: ``["backbone.*"]``; None: all.
        weights, gradients: which of the two.

    Raises:
        ConfigError: a number below 1, or nothing to record; at the start: a pattern that matches
            nothing.
    """

    only_watches = True

    def __init__(
        self,
        every_updates: int | None = None,
        every_epochs: int | None = 1,
        parameters: Sequence[str] | None = None,
        weights: bool = True,
        gradients: bool = True,
    ) -> None:
        if not weights and not gradients:
            raise ConfigError("hooks.histograms.weights", "it and gradients are false: of nothing")
        self.parameters = parameters
        self.weights = weights
        self.gradients = gradients
        self._cadence = Cadence("hooks.histograms", every_updates, every_epochs)
        self._due = False  # the update at hand is one of them
        self._chosen: frozenset[str] | None = None

    def on_start(self, task: Task) -> None:
        if self.parameters is not None:
            key = f"hooks.{self.name}.parameters"
            self._chosen = task.freezing.match(self.parameters, key).parameters

    def on_phase_start(self, task: Task) -> None:
        self._cadence.begin_phase(task)

    def on_gradients(self, task: Task) -> None:
        self._due = self._cadence.due(task)
        if self._due and self.gradients and task.skip_reason is None:
            names = task.parameter_names()
            for parameter in task.trainable:
                name = names[id(parameter)]
                if parameter.grad is not None and self._takes(name):
                    task.record_histogram(f"gradients/{name}", parameter.grad)

    def on_step(self, task: Task) -> None:
        if not self._due or not task.updated:
            return
        self._due = False
        self._cadence.counted()
        if self.weights:
            names = task.parameter_names()
            for module in (task.bare_model, task.criterion_module):
                for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                    if self._takes(names[id(parameter)]):
                        task.record_histogram(f"weights/{names[id(parameter)]}", parameter)

    def state_dict(self) -> dict[str, Any]:
        return self._cadence.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cadence.load_state_dict(state)

    def _takes(self, name: str) -> bool:
        return self._chosen is None or name in self._chosen
