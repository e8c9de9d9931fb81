"""Stepping: what a train step says to its task, from the batch to the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.backends import Backend
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.errors import ConfigError, NoBatchError, PhaseloopError, listing
from phaseloop.engine.events import Dispatcher
from phaseloop.engine.gradients import apply_update, clear
from phaseloop.engine.model_options import ModelOptions, channels_last
from phaseloop.engine.precision import Precision
from phaseloop.engine.remarks import looks, remark
from phaseloop.engine.turns import Turns

NO_SCALED_CLOSURE = (
    "an optimizer that calls a closure has to see losses as they are, and float16 scales them; "
    "use bfloat16 or float32"
)


class Stepping(Turns):
    """The part of a task that a train step talks to.

    Attributes:
        changes_input: batches are converted for the model.
        gradient_norm: of the gradients before clipping, where ``clip_norm`` is set.
        measuring: losses and outputs are taken in by the meters; off while a closure is called
            again.
    """

    backend: Backend
    hooks: Dispatcher
    precision: Precision
    model_options: ModelOptions
    changes_input: bool

    def __init__(self) -> None:
        super().__init__()
        self.gradient_norm: Tensor | None = None
        self.measuring = True
        self._passed = False
        self._yielded = 0

    @property
    def device(self) -> torch.device:
        """Where the model and the batches are."""
        return self.backend.device

    # --- the batch ---

    def next_batch(self) -> Batch:
        """The micro-batch of this step.

        Raises:
            NoBatchError: the step has already taken what the plan gives it, or is one that takes
                whole windows.
        """
        batch = self._pending
        if batch is None:
            raise NoBatchError(self._why_no_batch())
        self._pending = None
        if self.changes_input:
            batch = self._prepared(batch)
        self.batch = batch
        return batch

    def window(self) -> Iterator[Batch]:
        """The micro-batches of the window, for a step that takes it whole; as often as asked for.

        Each time is a pass of its own: its gradients make a mean over the batch.

        Raises:
            PhaseloopError: the step was not registered with ``takes="window"``.
        """
        if not self.step_facts.takes_window:
            raise PhaseloopError(
                "this step gets one micro-batch a call, by next_batch(); one that goes through "
                'window() has to be registered with takes="window"'
            )
        self._check_pass()
        self.accumulator.begin_pass()
        self._passed = False
        for number, batch in enumerate(self._window, 1):
            if self.changes_input:
                batch = self._prepared(batch)
            self.batch = batch
            self._yielded = number
            yield batch
        self._passed = len(self._window) > 1

    def _check_pass(self) -> None:
        """Passes that are added into one update have to be means over the same."""
        accumulator = self.accumulator
        if not accumulator.has_gradients:
            return
        if accumulator.is_weighted:
            raise PhaseloopError(
                "this pass through window() follows one whose losses had weights, and update() was "
                "not called in between: two sums of weights have no one mean"
            )
        if self._yielded < len(self._window):
            raise PhaseloopError(
                "this pass through window() follows one that was broken off, and update() was not "
                "called in between: a mean over a part of the batch and one over all of it"
            )

    def _prepared(self, batch: Batch) -> Batch:
        """In the types and the memory layout that the model expects."""
        batch = batch.with_data(self.precision.cast_input(batch.data))
        if self.model_options.channels_last:
            batch.input = channels_last(batch.input)
        return batch

    def _why_no_batch(self) -> str:
        update = self.progress.updates + 1
        if self.step_facts.takes_window:
            return (
                f"this step takes the whole window of update {update}: go through task.window(), "
                f"as often as you like"
            )
        taken, planned = self.accumulator.taken, len(self.accumulator.window.pieces)
        return (
            f"this step asked for another micro-batch; it gets one per call, and this was "
            f"number {taken} of {planned} in the window of update {update}"
        )

    # --- forward and loss ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the configured precision."""
        if self.precision.changes_forward:
            output = self.compute(self.model, *args, **kwargs)
        else:
            try:
                output = self.model(*args, **kwargs)
            except Exception as error:
                inputs = looks([*args, *kwargs.values()])
                remark(error, f"phaseloop: the model was called with {inputs}")
                raise
        self.output = output
        self.hooks.on_forward(self)  # type: ignore[arg-type]
        return output

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` in the configured precision.

        For steps that call parts of the model. What comes out is at least float32.
        """
        if not self.precision.changes_forward:
            return function(*args, **kwargs)
        with self.precision.autocast(self.device):
            output = function(*args, **kwargs)
        return self.precision.widen(output)

    def criterion(self, output: Any, target: Any, weight: Tensor | float | None = None) -> Tensor:
        """The mean loss of the micro-batch; meters are updated.

        Args:
            output, target: what the criterion and the meters are given.
            weight: see :meth:`measure`.

        Raises:
            ConfigError: the task has no criterion.
        """
        if self.criterion_module is None:
            raise ConfigError("criterion", "this step needs a criterion, and there is none")
        try:
            loss, parts = self.criterion_module(output, target), None
        except Exception as error:
            given = f"output {looks(output)} and target {looks(target)}"
            remark(error, f"phaseloop: the criterion was called with {given}")
            raise
        if not isinstance(loss, Tensor):
            loss, parts = loss_of(loss)
        self.measure(loss, output, target, parts, weight)
        return loss

    def measure(
        self,
        loss: Tensor | None,
        output: Any,
        target: Any,
        parts: Mapping[str, Tensor] | None = None,
        weight: Tensor | float | None = None,
    ) -> None:
        """Note a loss that the step computed itself; ``criterion`` does this for its own.

        Args:
            loss: mean over the micro-batch's samples, one element; None: there is none, as in the
                test of a step that only measures outputs.
            output, target: what the meters are given.
            parts: named parts of the loss, each a mean as the loss is.
            weight: number of elements that they are means over, where that is not the number of
                samples, as for ``backward``: what is shown is then the mean over all elements.

        Raises:
            ConfigError: the loss or a part of it has more than one element.
        """
        self.loss = loss
        batch = self.batch
        if batch is not None and batch.weight and self.measuring:
            if weight is None:
                weight = batch.weight
            elif isinstance(weight, Tensor):
                weight = scalar(weight, "measure(weight=...)")
            if loss is None:
                self.meters.update(None, weight, output, target)
            else:
                value = loss.detach() if loss.dim() == 0 else scalar(loss, "criterion")
                self.meters.update(value, weight, output, target)
                if self.train:
                    self.recorder.add("loss", value, weight)
            if parts:
                self._measure_parts(parts, weight)
        self.hooks.on_loss_and_meter(self)  # type: ignore[arg-type]

    def measure_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Note losses that are no parts of one sum, such as those of two optimizers.

        Args:
            parts: by name, each a mean over the micro-batch's samples, one element. Each is
                logged and metered as ``loss/NAME``.

        Raises:
            ConfigError: one of them has more than one element.
        """
        *_, self.loss = parts.values()
        if self.batch is not None and self.batch.weight and self.measuring:
            self._measure_parts(parts, self.batch.weight)
        self.hooks.on_loss_and_meter(self)  # type: ignore[arg-type]

    def _measure_parts(self, parts: Mapping[str, Tensor], weight: Tensor | float) -> None:
        named = {name: scalar(part, "criterion") for name, part in parts.items() if name != "loss"}
        self.meters.add_parts(named, weight)
        if self.train:
            for name, part in named.items():
                self.recorder.add(f"loss/{name}", part, weight)

    # --- gradients and update ---

    def backward(self, loss: Tensor, weight: Tensor | float | None = None) -> None:
        """Add this micro-batch's gradients.

        Args:
            loss: a mean over samples, one element.
            weight: number of elements that the loss is a mean over, where that is not the number
                of samples: valid tokens, say. The update is then the mean over all elements of
                the batch. A loss of weight 0 must still be finite.

        Raises:
            PhaseloopError: called in a test phase, or before the step took its batch; or with a
                weight twice for one micro-batch, or for some micro-batches of a window only.
                At ``update``: some of several processes gave a weight, and others none.
        """
        batch = self.batch
        if not self.train or batch is None:
            raise PhaseloopError(
                "backward() belongs after next_batch() in a train phase; "
                "guard it with `if task.train:`"
            )
        if self._passed and self.step_facts.takes_window:
            raise PhaseloopError(
                "backward() belongs inside the loop over window(): a loss is weighted by the "
                "micro-batch at hand, and the loop has gone through all of them"
            )
        loss = self.accumulator.weigh(loss, batch, weight)
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.hooks.on_backward(self)  # type: ignore[arg-type]

    def update(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Move the parameters, if the window is full; before that, nothing.

        A step that takes whole windows may call it several times in a window, each time for the
        gradients since the last one: once for each optimizer, or for each piece of a sequence.

        Args:
            closure: for optimizers that ask for loss and gradients several times a step: goes
                through the window, calls ``backward``, and gives the loss. Only in a step that
                takes whole windows.

        Raises:
            PhaseloopError: a closure in a step that gets micro-batches.
            ConfigError: a closure with ``precision=float16``, whose losses are scaled.
        """
        if not self.train:
            return
        accumulator = self.accumulator
        if self.step_facts.takes_window:
            if closure is not None:
                self._check_closure()
            if closure is not None or accumulator.has_gradients:
                apply_update(self, closure)  # type: ignore[arg-type]
        elif closure is not None:
            raise PhaseloopError(
                'a closure goes through the whole window: register the step with takes="window"'
            )
        elif accumulator.full and not accumulator.applied:
            apply_update(self)  # type: ignore[arg-type]

    def _check_closure(self) -> None:
        if self.precision.scaler is not None:
            raise ConfigError("precision", NO_SCALED_CLOSURE)
        if len(self.stepping) > 1:
            raise ConfigError(
                "optimizers",
                f"a closure is for one optimizer at a time, and {listing(self.stepping)} are at "
                f"hand; use task.only(NAME)",
            )

    def skip_update(self, reason: str, *optimizers: str) -> None:
        """In ``on_gradients``: leave the parameters as they are at this update.

        Args:
            reason: why, for the log.
            optimizers: leave out only these of several, by name; none: all that are at hand.

        Raises:
            PhaseloopError: called at another event.
        """
        if not self.may_skip:
            raise PhaseloopError(
                "skip_update() belongs in on_gradients: before it there is no update to leave out, "
                "and after it the parameters have moved"
            )
        if not optimizers:
            self.skip_reason = reason
        for name in optimizers:
            self.note_skip(reason, name)  # type: ignore[misc]
            self.left_out[name] = reason
            clear(self.parameters_of[name])  # without gradients it does not step


def loss_of(result: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss and its named parts, of what a criterion gave: a tensor, or a mapping of parts.

    The loss is the entry ``loss``, or else the sum of all.
    """
    if isinstance(result, Tensor):
        return result, {}
    if "loss" in result:
        return result["loss"], result
    return torch.stack([*result.values()]).sum(), result


def scalar(value: Tensor, key: str) -> Tensor:
    """``value`` without its graph, in shape [].

    Raises:
        ConfigError: it has more than one element.
    """
    if value.numel() != 1:
        raise ConfigError(
            key, f"a tensor of shape {list(value.shape)} is not one number; take its mean"
        )
    return value.detach().reshape(())
