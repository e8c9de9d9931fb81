"""Hook ``activations``: what comes out of modules: mean, spread, zeros, the largest, the broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import ConfigError, nearest
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome


@register_hook("activations")
class Activations(Hook):
    """Records, of the outputs of modules in a train phase, ``activations/MODULE/mean``, ``std``
    (over all elements, not less one), ``zeros`` (their share), ``absmax`` and ``nonfinite`` (the
    share of NaN and infinities, which the others leave out). All micro-batches of an update count
    as one. An output of several tensors has a name for each: ``MODULE/0``, ``MODULE/hidden``.

    Modules are hooked at the updates that are measured, and at no others; what is measured stays
    on the device until the log point. Of several processes each measures its share, and
    ``row_sync`` takes the mean of these numbers: of shares and means that is the whole batch's, of
    ``std`` and ``absmax`` it is not quite.

    Args:
        modules: patterns of their names, such as ``blocks.*`` or ``*.norm``; empty: all that have
            no modules in them.
        every_updates: measure every n-th update; None: those of log points.

    Raises:
        ConfigError: n is less than 1; a pattern matches no module; the model is compiled, in which
            modules are not called one by one.
    """

    only_watches = True

    def __init__(self, modules: Sequence[str] = (), every_updates: int | None = None) -> None:
        if isinstance(modules, str) or not all(isinstance(one, str) for one in modules):
            raise ConfigError("hooks.activations.modules", f"give a list, not {modules!r}")
        if every_updates is not None and every_updates < 1:
            raise ConfigError("hooks.activations.every_updates", f"{every_updates} is less than 1")
        self.modules = list(modules)
        self.every_updates = every_updates
        self._chosen: dict[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, list[_Call]] = {}
        self._window: Window | None = None

    def on_start(self, task: Task) -> None:
        _check_compiled(task, f"hooks.{self.name}")
        self._chosen = _matching(task.bare_model, self.modules, f"hooks.{self.name}.modules")
        self._arm(task)

    def on_resume(self, task: Task) -> None:
        self._arm(task)  # after a roll-back another update comes next

    def on_step(self, task: Task) -> None:
        if not (task.train and task.accumulator.closed):
            return
        if task.updated and self._window is task.accumulator.window:
            for name, calls in self._calls.items():
                elements = float(sum(call.elements for call in calls))
                for what, value in _together(calls).items():
                    task.record(f"activations/{name}/{what}", value, elements)
        self._calls, self._window = {}, None
        self._arm(task)

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._disarm()

    def _arm(self, task: Task) -> None:
        """Hook the modules if the next update is one that is measured."""
        every = self.every_updates or task.recorder.every
        if task.test_only or (task.progress.updates + 1) % every:
            self._disarm()
        elif not self._handles:
            for name, module in self._chosen.items():
                self._handles.append(module.register_forward_hook(self._measuring(task, name)))

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _measuring(self, task: Task, name: str) -> Any:
        def measure(module: nn.Module, inputs: Any, output: Any) -> None:
            batch, window = task.batch, task.accumulator.window
            # A hook may call the model too; a batch of weight 0 only keeps processes in step.
            if not task.train or batch is None or not batch.weight or not task.measuring:
                return
            if self._window is not window:  # what was begun before was broken off, or left out
                self._calls, self._window = {}, window
            for path, tensor in _tensors(output, name):
                self._calls.setdefault(path, []).append(_Call(tensor))

        return measure


class _Call:
    """One output of a module; all but ``elements`` are float64 of shape [] on the device.

    Attributes:
        elements: how many.
        finite: how many of them are.
        mean, squares: of these, the mean, and the sum of squared distances from it.
        zeros: how many.
        largest: the largest absolute value of the finite ones.
    """

    __slots__ = ("elements", "finite", "largest", "mean", "squares", "zeros")

    def __init__(self, output: Tensor) -> None:
        with torch.no_grad():
            values = output.detach()
            values = values if values.dtype == torch.float64 else values.float()
            finite = torch.isfinite(values)
            self.elements = values.numel()
            self.finite = finite.sum(dtype=torch.float64)
            self.zeros = (values == 0).sum(dtype=torch.float64)
            values = torch.where(finite, values, 0.0)
            self.largest = values.abs().amax().double()
            self.mean = values.sum(dtype=torch.float64) / self.finite.clamp(min=1)
            away = torch.where(finite, values - self.mean.to(values.dtype), 0.0)
            self.squares = away.square().sum(dtype=torch.float64)


def _together(calls: Sequence[_Call]) -> dict[str, Tensor]:
    """Statistics of several outputs as of one; NaN where nothing was finite."""
    elements = sum(call.elements for call in calls)
    finite, mean, squares, zeros, largest = (
        torch.stack([getattr(call, name) for call in calls])
        for name in ("finite", "mean", "squares", "zeros", "largest")
    )
    total = finite.sum()
    overall = (finite * mean).sum() / total
    spread = (squares + finite * (mean - overall).square()).sum() / total
    return {
        "mean": overall,
        "std": spread.sqrt(),
        "zeros": zeros.sum() / elements,
        "absmax": torch.where(total > 0, largest.amax(), torch.nan),
        "nonfinite": 1 - total / elements,
    }


def _tensors(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of an output that have elements, each with its name."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.layout == torch.strided and output.numel():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _tensors(value, f"{name}/{key}")
    elif isinstance(output, (list, tuple)):
        for number, value in enumerate(output):
            yield from _tensors(value, f"{name}/{number}")


def _matching(model: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The modules that the patterns name."""
    modules = {name: module for name, module in model.named_modules() if name}
    if not patterns:
        leaves = {n: m for n, m in modules.items() if not any(True for _ in m.children())}
        return leaves or {type(model).__name__: model}
    found = {}
    for pattern in patterns:
        matched = {n: m for n, m in modules.items() if fnmatchcase(n, pattern)}
        if not matched:
            raise ConfigError(
                key, f"the pattern {pattern!r} matches no module.{nearest(pattern, modules)}"
            )
        found.update(matched)
    return {name: module for name, module in modules.items() if name in found}


def _check_compiled(task: Task, key: str) -> None:
    compiled = task.model_options.compiler is not None or any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in task.bare_model.modules()
    )
    if compiled:
        raise ConfigError(
            key,
            "the model is compiled, and its modules are not called one by one: leave the hook out, "
            "or train for a while with model.compile=false, which a resume may change",
        )
