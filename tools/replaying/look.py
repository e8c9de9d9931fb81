"""Looking at one update: it is run again, watched, and judged."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from phaseloop.engine import rng
from phaseloop.engine.task import Task
from phaseloop.tools.replaying.follow import Follower
from phaseloop.tools.replaying.found import Event, Fault, Line, Replay, Sample
from phaseloop.tools.replaying.report import told
from phaseloop.tools.replaying.run import Make
from phaseloop.tools.replaying.samples import alone
from phaseloop.tools.replaying.watch import Watch


def uncompiled(make: Make) -> Make:
    """The same task with its model as it is written, so that every operation can be seen."""

    def plain() -> Any:
        task, hooks = make()
        task.model_options = dataclasses.replace(task.model_options, compile=False)
        return task, hooks

    return plain


class Looker(Follower):
    """Watches one update, and the windows skipped before it until one is not finite.

    Args:
        update: which.
        orders: see :class:`Follower`.
    """

    def __init__(self, update: int, orders: dict[int, int]) -> None:
        super().__init__(update, update)
        self.orders = orders
        self.watch: Watch | None = None
        self.task: Task | None = None
        self.skips: list[str] = []
        self.batch: tuple[int, int | None] = (0, 0)
        self.skipped: Line | None = None
        self.gradients: dict[str, float] = {}
        self.parameters: dict[str, tuple[float, float]] = {}
        self._losses: list[tuple[int, Tensor, list[Event]]] = []
        self._state: dict[str, Any] = {}
        self._found = False
        self._attached = contextlib.ExitStack()

    def call(self, step: Any, task: Task) -> None:
        if not task.train or task.progress.updates != self.first - 1 or self._found:
            super().call(step, task)
            return
        if self.watch is None:
            self._begin(task)
        assert self.watch is not None
        with self.watch.looking():
            super().call(step, task)
            self.watch.note(task.batch)

    def _begin(self, task: Task) -> None:
        self.task = task
        self.watch = Watch(task, self.clock)
        self._state = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in task.raw_state().items()
        }
        self._losses, self.gradients = [], {}
        self.parameters = {
            name: (_norm(p), math.nan) for name, p in task.bare_model.named_parameters()
        }
        self._attached.enter_context(self.watch.attached())

    @property
    def _looks(self) -> bool:
        return self.watch is not None and not self._found

    def on_loss_and_meter(self, task: Task) -> None:
        if self.watch is not None and self._looks and task.loss is not None and task.train:
            self.watch.note(task.batch)
            loss = task.loss.detach()
            self._losses.append((self.watch.number, loss, self.watch.chain(loss)))

    def on_gradients(self, task: Task) -> None:
        with _disable_current_modes():  # what is measured here is no part of the update
            self._measure(task)

    def _measure(self, task: Task) -> None:
        super().on_gradients(task)
        if self.watch is not None and self._looks:
            names = task.parameter_names()
            for parameter in task.trainable:
                if parameter.grad is not None:
                    name, norm = names[id(parameter)], _norm(parameter.grad)
                    self.gradients[name] = norm
                    self.watch.note_gradient(name, parameter.grad)

    def on_step(self, task: Task) -> None:
        closes = task.train and task.accumulator.closed
        skipped = self.line(task) if closes and self._looks and not task.updated else None
        super().on_step(task)
        if self.watch is None or not closes:
            return
        reasons = [e["reason"] for e in task.recorder.events if e["event"] == "skip"]
        if self._found:
            self.skips += reasons
            return
        windows = task.phase.windows  # of a stream infinity, unless this was the last
        self.batch = (task.phase.position, windows if isinstance(windows, int) else None)
        self._attached.close()
        for name, parameter in task.bare_model.named_parameters():
            self.parameters[name] = self.parameters[name][0], _norm(parameter)
        overflow = self._overflow(task, reasons)
        self.skips += [f"{reason}{overflow}" for reason in reasons]
        self._found = self._is_bad() and not overflow
        if skipped is not None and self._found:
            self.skipped = dataclasses.replace(skipped, update=self.first)
        elif skipped is not None:
            self.watch = None  # the next window may make the update

    def on_end(self, task: Task, outcome: Any) -> None:
        self._attached.close()

    def _overflow(self, task: Task, reasons: list[str]) -> str:
        """What is said of a window that only the loss scale was too large for; else nothing."""
        assert self.watch is not None
        if task.updated or task.precision.scaler is None or self.bad_losses():
            return ""
        if not any("overflowed" in reason for reason in reasons):
            return ""
        first = f", first in {told(self.watch.events[0])}" if self.watch.events else ""
        return f"{first} (float16 lowers its scale and goes on; at every scale it is a fault)"

    def _is_bad(self) -> bool:
        assert self.watch is not None
        return bool(self.watch.gradients or self.bad_losses())

    def bad_losses(self) -> list[int]:
        """Numbers of the micro-batches whose loss was not finite."""
        bad = [n for n, loss, _ in self._losses if not bool(torch.isfinite(loss).all())]
        return list(dict.fromkeys(bad))

    def tell(self, replay: Replay) -> None:
        """Write down what was seen."""
        watch = self.watch
        if watch is None:
            return
        replay.micro_batches = [watch.samples(n) for n in range(1, len(watch.batches) + 1)]
        replay.batch, replay.skips = self.batch, self.skips
        replay.gradients, replay.parameters = self.gradients, self.parameters
        replay.line = self.skipped or (self.lines[0] if self.lines else None)
        replay.fault = self._fault(replay.error)
        if replay.fault is None and watch.events and not replay.error:
            replay.harmless = watch.events[0]

    def _fault(self, error: str) -> Fault | None:
        watch = self.watch
        assert watch is not None
        losses = self.bad_losses()
        weights = [n for n, (b, a) in self.parameters.items() if _bad(a) and not _bad(b)]
        weights = [n for n in weights if self.lines]  # else it did not come to an end
        what = self._what(losses, weights, error)
        if not what:
            return None
        number, chain = self._chain(weights)
        if not chain and error:
            chain = watch.events[:3]
        if not number and chain:
            number = chain[0].micro_batch
        fault = Fault(
            what=what,
            first=chain[0] if chain else None,
            then=chain[1:],
            micro_batch=number,
            data=[bad for bad in watch.data if bad.micro_batch == number],
            before=watch.places.before,
            gradients=list(watch.gradients),
            weights=weights,
        )
        fault.parameter = _parameter(fault)
        fault.samples, fault.samples_are = self._samples(fault)
        return fault

    def _chain(self, weights: list[str]) -> tuple[int, list[Event]]:
        """Micro-batch and events of the first loss, gradient or weight that was not finite."""
        watch, task = self.watch, self.task
        assert watch is not None and task is not None
        for number, loss, chain in self._losses:
            if not bool(torch.isfinite(loss).all()):
                return number, chain
        for number, chain in watch.gradients.values():
            return number, chain
        parameters = dict(task.bare_model.named_parameters())
        return 0, watch.chain(parameters[weights[0]].detach()) if weights else []

    def _what(self, losses: list[int], weights: list[str], error: str) -> list[str]:
        watch = self.watch
        assert watch is not None
        what = []
        if losses:
            several = len(watch.batches) > 1
            numbers = ", ".join(map(str, losses))
            what.append(f"the loss of micro-batch {numbers}" if several else "the loss")
        if watch.gradients:
            count = len(watch.gradients)
            what.append(f"the gradient{'s' * (count > 1)} of {count} parameter{'s' * (count > 1)}")
        if weights:
            what.append(f"{len(weights)} parameter{'s' * (len(weights) > 1)} after the update")
        if watch.places.before:
            what.append("the training before the update")
        if error and watch.events and not what:
            what.append("a result, and then an error")
        return what

    def _samples(self, fault: Fault) -> tuple[list[Sample], str]:
        watch, task, first = self.watch, self.task, fault.first
        assert watch is not None and task is not None
        if fault.before or not fault.micro_batch or (first and first.stage == "update"):
            return [], ""
        if fault.data and (first is None or first.kind == "read"):
            samples = [sample for bad in fault.data for sample in bad.samples]
            return list(dict.fromkeys(samples)), "not finite as the data has them"
        backward = not self.bad_losses() and not self._raised_early()
        host = rng.HostGenerators()
        try:
            batch = watch.batches[fault.micro_batch - 1]
            rows = alone(task, self._state, batch, backward)
        finally:
            host.put_back()
        if rows:
            return watch.samples(fault.micro_batch, rows), "run alone, it goes wrong too" if len(
                rows
            ) == 1 else "run alone, each goes wrong too"
        if first is not None and first.rows:
            found = watch.samples(fault.micro_batch, first.rows)
            return found, "their rows of that result are not finite"
        why = "none goes wrong alone" if rows == [] else "they cannot be run one by one"
        return watch.samples(fault.micro_batch), f"all of the micro-batch: {why}"

    def _raised_early(self) -> bool:
        return not self._losses


def _parameter(fault: Fault) -> str:
    first = fault.first
    if first is not None and first.kind == "read" and first.source.startswith("parameter "):
        return first.source.removeprefix("parameter ")
    if first is not None and first.parameters and first.stage != "backward":
        return first.parameters[0]
    return next(iter([*fault.gradients, *fault.weights]), "")


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


def _bad(norm: float) -> bool:
    return not math.isfinite(norm)
