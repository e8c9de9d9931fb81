"""Hook ``average``: averaged weights, kept beside the raw ones and used for testing."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shards import is_shard, local, whole
from phaseloop.engine.swapping import Place, places, state_with
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_HALF = (torch.float16, torch.bfloat16)
_DECAY = 0.999


@register_hook("average")
class Average(Hook):
    """Averages parameters over updates (``ema``) or over some points of the run (``swa``).

    The first sample is copied. Then, with torch's functions of ``torch.optim.swa_utils``:

    * ``ema``: average = decay * average + (1 - decay) * weights;
    * ``swa``: average = average + (weights - average) / (samples so far + 1).

    A skipped update is no sample. Parameters in half precision are averaged in float32. The
    averages are in ``task.averages[name]`` and, by the model's names, in every checkpoint.

    Args:
        kind: ``ema`` or ``swa`` (Izmailov et al., "Averaging Weights Leads to Wider Optima and
            Better Generalization", UAI 2018).
        decay: of ``ema``; None: 0.999.
        warmup: of ``ema``: use min(decay, (1 + k) / (10 + k)) after k samples, so that the first
            weights are forgotten sooner (TensorFlow's ``ExponentialMovingAverage``, num_updates).
        every_updates: take a sample after every n-th update; default for ``ema``: 1.
        every_epochs: take a sample at the end of every n-th epoch; default for ``swa``: 1.
        start_updates, start_epochs, start_fraction: no sample in the first so many updates or
            epochs, or in this part of the run; give one at most.
        buffers: ``copy`` those of the newest sample, or ``average`` them like parameters. Integers
            are always copied.
        test: test phases, and ``only=test``, test the average.

    Raises:
        ConfigError: a number is out of range, or options contradict each other.
    """

    order = Order.AVERAGE
    shapes_tests = True

    def __init__(
        self,
        kind: str = "ema",
        decay: float | None = None,
        warmup: bool = False,
        every_updates: int | None = None,
        every_epochs: int | None = None,
        start_updates: int | None = None,
        start_epochs: int | None = None,
        start_fraction: float | None = None,
        buffers: str = "copy",
        test: bool = True,
    ) -> None:
        self.kind = kind
        self.decay = _DECAY if decay is None else decay
        self.warmup = warmup
        self.every_updates = every_updates
        self.every_epochs = every_epochs
        self.start = {"start_updates": start_updates, "start_epochs": start_epochs,
                      "start_fraction": start_fraction}  # fmt: skip
        self.buffers = buffers
        self.test = test
        self._check(decay)
        if every_updates is None and every_epochs is None:
            self.every_updates, self.every_epochs = (1, None) if kind == "ema" else (None, 1)
        self.samples = 0
        self._task: Task | None = None
        self._pairs: _Pairs | None = None
        self._moves: Callable[..., None] | None = None
        self._planned = 0

    def on_start(self, task: Task) -> None:
        self._task = task
        self._pairs = None
        self._planned = task.stages.updates
        task.before_save.append(self._equal_buffers)
        if self.test:
            if task.swapping.owner not in ("", self.name):
                raise ConfigError(
                    f"hooks.{self.name}.test",
                    f"hooks.{task.swapping.owner} has its average tested already; "
                    f"say test: false in one of the two",
                )
            task.swapping.owner = self.name
        if not task.resumed:
            self._check_start(task)
        if task.test_only and self.test and task.averages.get(self.name):
            log.info("tested are the averaged weights of hooks.%s", self.name)

    def on_phase_start(self, task: Task) -> None:
        if self.test and not task.train:
            self._equal_buffers(task)
            task.swapping.put_in(task.averages.get(self.name, {}))

    def on_step(self, task: Task) -> None:
        # Not at on_update: an update of several optimizers, or of several chunks, has several.
        every, update = self.every_updates, task.progress.updates
        if task.updated and every is not None and update % every == 0 and self._begun(task, update):
            self._sample(task)

    def on_phase_end(self, task: Task) -> None:
        every, progress = self.every_epochs, task.progress
        if every is None or not task.train or task.plan.epoch_is_unfinished(progress):
            return
        if progress.epoch % every == 0 and self._begun(task, progress.updates):
            self._sample(task)

    def state(self) -> dict[str, Any]:
        """The averages as a whole ``state_dict`` of the bare model, for ``load_state_dict``.

        Sharded ones are gathered: all processes have to call it.

        Raises:
            PhaseloopError: no sample was taken yet.
        """
        task = self._task
        averages = {} if task is None else task.averages.get(self.name, {})
        if task is None or not averages:
            raise PhaseloopError(f"hooks.{self.name} has taken no sample yet: there is no average")
        there = places(task.bare_model)
        state = state_with(
            task.bare_model,
            {id(there[name].tensor): value.clone() for name, value in averages.items()},
        )
        return cast(dict[str, Any], whole(state, keep=True))

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]

    def holds(self, task: Task) -> list[Tensor]:
        return [place.tensor for place in places(task.bare_model).values()]

    def _equal_buffers(self, task: Task) -> None:
        """Of several processes each has averaged its own buffers; what is saved is the primary's.

        So that is what all test, as a process that goes on from the checkpoint does.
        """
        averages = task.averages.get(self.name)
        if task.agreement is not None and averages:
            there = places(task.bare_model)
            task.backend.make_equal([v for name, v in averages.items() if there[name].buffer])

    def _begun(self, task: Task, update: int) -> bool:
        """Whether a sample may be taken after update number ``update``."""
        start = self.start
        if start["start_updates"] is not None:
            return update > start["start_updates"]
        if start["start_epochs"] is not None:
            return task.progress.epoch > start["start_epochs"]
        if start["start_fraction"] is not None:
            return update > start["start_fraction"] * self._planned
        return True

    def _sample(self, task: Task) -> None:
        averages = task.averages.setdefault(self.name, {})
        if self.samples == 0:
            averages.clear()  # what is missing is made, with the present values
        if not averages or self._pairs is None or self._pairs.averages is not averages:
            self._pairs = _Pairs(places(task.bare_model), averages, self.buffers == "average")
        if self.samples:
            if self._moves is None or self.warmup:
                self._moves = self._make_moves()
            self._pairs.move(self._moves, self.samples)
        self.samples += 1

    def _make_moves(self) -> Callable[..., None]:
        """torch's function that moves averages; making one costs more than calling it."""
        if self.kind == "swa":
            return get_swa_multi_avg_fn()
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.samples) / (10 + self.samples))
        return get_ema_multi_avg_fn(decay)

    def _check(self, decay: float | None) -> None:
        key = "hooks.average"
        for name, value, allowed in (
            ("kind", self.kind, ("ema", "swa")),
            ("buffers", self.buffers, ("copy", "average")),
        ):
            if value not in allowed:
                raise ConfigError(f"{key}.{name}", f"{value!r} is not one of {', '.join(allowed)}")
        if self.kind == "swa" and (decay is not None or self.warmup):
            name = "warmup" if decay is None else "decay"
            raise ConfigError(f"{key}.{name}", "belongs to kind: ema; swa weighs all alike")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"{key}.decay", f"{decay} is not at least 0 and less than 1")
        if self.every_updates is not None and self.every_epochs is not None:
            raise ConfigError(f"{key}.every_epochs", "give every_updates or every_epochs, not both")
        for name in ("every_updates", "every_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{key}.{name}", f"{value} is less than 1")
        given = {name: value for name, value in self.start.items() if value is not None}
        if len(given) > 1:
            raise ConfigError(f"{key}.{list(given)[1]}", f"give one of {', '.join(given)}")
        for name, start in given.items():
            if start < 0 or (name == "start_fraction" and start >= 1):
                raise ConfigError(f"{key}.{name}", f"{start} is out of range")

    def _check_start(self, task: Task) -> None:
        """A start that never comes would be no average, in silence."""
        if task.debug.fast is not None:
            return
        plans = [plan for plan in task.stages.plans() if plan.trains]
        if not all(plan.updates for plan in plans):  # a length in time: nobody knows
            if self.start["start_fraction"] is not None:
                raise ConfigError(
                    f"hooks.{self.name}.start_fraction",
                    "of a run whose length is a time, or passes of any length, nobody knows a "
                    "part; use start_updates or start_epochs",
                )
            return
        length = {"start_updates": float(self._planned),
                  "start_epochs": sum(plan.epochs for plan in plans)}  # fmt: skip
        for name, planned in length.items():
            start = self.start[name]
            if start is not None and planned and start >= planned:
                raise ConfigError(
                    f"hooks.{self.name}.{name}",
                    f"{start} is not before the end of the run, which has {planned:g}",
                )


class _Pairs:
    """Each tensor of the model with its average; averages that are missing are made.

    Args:
        there: the model's tensors by name.
        averages: by the same names; filled, with the present values, where it is empty.
        average_buffers: average floating-point buffers too, and do not only copy them.
    """

    def __init__(
        self, there: dict[str, Place], averages: dict[str, Tensor], average_buffers: bool
    ) -> None:
        self.averages = averages
        self._moved: list[Tensor] = []
        self._copied: list[Tensor] = []
        self._moved_from: list[tuple[dict[str, Any], str]] = []
        self._copied_from: list[tuple[dict[str, Any], str]] = []
        self._widened = False
        self._sharded = False
        for name, place in there.items():
            tensor = place.tensor.detach()
            if name not in averages:
                averages[name] = tensor.float() if tensor.dtype in _HALF else tensor.clone()
            # The modules' own dictionaries: a module may give itself another buffer.
            owner: Any = place.owner._buffers if place.buffer else place.owner._parameters
            average = averages[name]
            if is_shard(average):  # each process averages its own part
                self._sharded, average = True, local(average)
            if tensor.is_floating_point() and (average_buffers or not place.buffer):
                self._moved.append(average)
                self._moved_from.append((owner, place.key))
                self._widened |= average.dtype != tensor.dtype
            else:
                self._copied.append(average)
                self._copied_from.append((owner, place.key))

    def move(self, average: Callable[..., None], samples: int) -> None:
        """One more sample, by a function of ``torch.optim.swa_utils``; what is only copied is."""
        if self._moved:
            values = [owner[key] for owner, key in self._moved_from]
            if self._sharded:
                values = [local(value) for value in values]
            if self._widened:
                values = [v.detach().to(a.dtype) for v, a in zip(values, self._moved, strict=True)]
            average(self._moved, values, samples)
        if self._copied:
            sources = [local(owner[key]) for owner, key in self._copied_from]
            torch._foreach_copy_(self._copied, sources)
