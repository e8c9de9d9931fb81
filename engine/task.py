"""Task: everything that one training needs, and what a train step says to it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine import assembly, rng
from phaseloop.engine.backends import Backend, Single
from phaseloop.engine.checkpoint.contents import small_state
from phaseloop.engine.checkpoint.optimizer_state import check_names, parameter_names
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import ConfigError, NoBatchError, PhaseloopError
from phaseloop.engine.events import Dispatcher
from phaseloop.engine.freezing import Freezing
from phaseloop.engine.gradients import Accumulator, apply_update, clear, count_groups, optimized
from phaseloop.engine.meters import MeterSet
from phaseloop.engine.phases import TRAIN, PhasePlan, Phases
from phaseloop.engine.precision import Precision
from phaseloop.engine.progress import Progress
from phaseloop.engine.recorder import Recorder
from phaseloop.engine.run_folder import RunFolder
from phaseloop.engine.schedules import Rates, Schedule
from phaseloop.engine.settings import Gradients, Run
from phaseloop.engine.signals import Signals
from phaseloop.engine.swapping import Swapping
from phaseloop.engine.walk import Walk

log = logging.getLogger("phaseloop")

MakeOptimizer = Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]]


class Task(Walk):
    """Everything of one training: data, model, loss, optimizers, meters, phases, position.

    Args:
        model: the network.
        criterion: called with (output, target), gives the mean loss over the batch, or a mapping
            of named parts whose sum, or whose entry ``loss``, is the loss.
        optimizer: an optimizer, several by name, or a function of the model that makes them.
        train: training data; None: only testing.
        test: test data: one set, called ``test``, or several by name.
        phases: length and test cadence.
        schedule: one schedule, or several for different options of the groups.
        train_meters, test_meters: name to meter, or to a torchmetrics metric.
        train_step: name of a registered step, or a step itself.
        gradients: clipping.
        freeze: patterns of parameters, or of modules, that are not trained: ``["backbone.*"]``.
        precision: ``float32``, ``bfloat16`` (autocast) or ``float64``.
        backend: how to run; None: this process, on a GPU where there is one.
        seed: of everything random.
        run: the run's folder and how it behaves as a process.
        config: the configuration that the task was made from, as plain Python; kept in every
            checkpoint and compared on a resume.

    Raises:
        ConfigError: options that contradict each other or are out of range.
        DataError: a data set that cannot be used.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        phases: Phases,
        criterion: Callable[..., Any] | None = None,
        optimizer: Optimizer | Mapping[str, Optimizer] | MakeOptimizer | None = None,
        train: Data | None = None,
        test: Data | Mapping[str, Data] | None = None,
        schedule: Schedule | Sequence[Schedule] = (),
        train_meters: Mapping[str, Any] | None = None,
        test_meters: Mapping[str, Any] | None = None,
        train_step: str | Callable[[Any], None] = "standard",
        gradients: Gradients | None = None,
        freeze: Sequence[str] = (),
        precision: str = "float32",
        backend: Backend | None = None,
        seed: int = 0,
        run: Run | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.run = run or Run()
        self.seed = seed
        self.config = dict(config or {})
        self.bare_model = model
        self.criterion_module = criterion
        self.phases = phases
        self.gradients = gradients or Gradients()
        self.precision = Precision(precision)
        self.backend = backend or Single()
        self.train_data = train
        self.test_data = dict(test or {}) if isinstance(test, Mapping | None) else {"test": test}
        self.schedules = list(schedule) if isinstance(schedule, Sequence) else [schedule]
        assembly.check(self)
        self.freezing = Freezing(self._named_modules(), freeze)
        self.train_step, self.whole_model_forward = assembly.resolve_step(train_step)
        self.given_optimizer = optimizer
        self.optimizers: dict[str, Optimizer] = {}
        self.rates: dict[str, Rates] = {}
        self.loaders = {}
        self.trainable = []
        self.meter_sets = {TRAIN: MeterSet(TRAIN, train_meters)}
        for name in self.test_data:
            # Every set measures for itself, so each gets meters of its own.
            self.meter_sets[name] = MeterSet(name, copy.deepcopy(dict(test_meters or {})))
        self.progress = Progress()
        self.recorder = Recorder(self.run.log_every)
        self.signals = Signals(self.run.grace)
        self.swapping = Swapping(model)
        self.averages: dict[str, dict[str, Tensor]] = {}
        self.accumulator = Accumulator(1)
        self.plan = PhasePlan(phases, 0, list(self.test_data))
        self.hooks = Dispatcher({})
        self.folder = RunFolder(Path(self.run.dir)) if self.run.dir is not None else None
        self.test_only = False
        self.resumed = False
        self.resumed_from = ""
        self.before_save: list[Callable[[Task], None]] = []
        self.identity: dict[str, Any] = {}
        self.origins: list[dict[str, str]] = []
        self.metrics: dict[str, float] = {}
        self.best: dict[str, float] = {}

    @property
    def device(self) -> torch.device:
        """Where the model and the batches are."""
        return self.backend.device

    @property
    def primary(self) -> bool:
        """This process writes shared files and speaks to the console."""
        return self.backend.primary

    @property
    def resumed_here(self) -> bool:
        """Resumed from a checkpoint of this run, which knows how long the files in the folder were.

        False also where the run was started from another run's checkpoint.
        """
        if self.folder is None or not self.resumed:
            return False
        return Path(self.resumed_from).resolve().parent == self.folder.checkpoints.resolve()

    @property
    def where(self) -> float:
        """Position in the training: updates done / updates planned; 1 once it is done."""
        planned = self.plan.updates
        return min(1.0, self.progress.updates / planned) if planned else 0.0

    @property
    def meters(self) -> MeterSet:
        """The meters of the phase at hand."""
        return self.meter_sets[self.phase.name]

    # --- what a train step says ---

    def next_batch(self) -> Batch:
        """The micro-batch of this step.

        Raises:
            NoBatchError: the step has already taken what the plan gives it.
        """
        batch = self._pending
        if batch is None:
            taken, planned = self.accumulator.taken, len(self.accumulator.window.pieces)
            raise NoBatchError(
                f"this step asked for another micro-batch; it gets one per call, and this was "
                f"number {taken} of {planned} in the window of update "
                f"{self.progress.updates + 1}"
            )
        self._pending = None
        if self.precision.changes_input:
            batch = Batch(self.precision.cast_input(batch.data), batch.indices, batch.weight)
        self.batch = batch
        return batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the configured precision."""
        if self.precision.changes_forward:
            with self.precision.autocast(self.device):
                output = self.model(*args, **kwargs)
            output = self.precision.widen(output)
        else:
            output = self.model(*args, **kwargs)
        self.output = output
        self.hooks.on_forward(self)
        return output

    def criterion(self, output: Any, target: Any) -> Tensor:
        """The mean loss of the micro-batch; meters are updated.

        Raises:
            ConfigError: the task has no criterion.
        """
        if self.criterion_module is None:
            raise ConfigError("criterion", "this step needs a criterion, and there is none")
        result = self.criterion_module(output, target)
        parts: Mapping[str, Tensor] = {} if isinstance(result, Tensor) else result
        if not parts:
            loss: Tensor = result
        elif "loss" in parts:
            loss = parts["loss"]
        else:
            loss = torch.stack([*parts.values()]).sum()
        self.measure(loss, output, target, parts)
        return loss

    def measure(
        self, loss: Tensor, output: Any, target: Any, parts: Mapping[str, Tensor] | None = None
    ) -> None:
        """Note a loss that the step computed itself; ``criterion`` does this for its own.

        Args:
            loss: mean over the micro-batch's samples, one element.
            output, target: what the meters are given.
            parts: named parts of the loss, each a mean over samples.

        Raises:
            ConfigError: the loss or a part of it has more than one element.
        """
        self.loss = loss
        weight = self.batch.weight if self.batch is not None else 0
        if weight:
            value = loss.detach() if loss.dim() == 0 else _scalar(loss, "criterion")
            self.meters.update(value, weight, output, target)
            if self.train:
                self.recorder.add("loss", value, weight)
            if parts:
                self._measure_parts(parts, weight)
        self.hooks.on_loss_and_meter(self)

    def backward(self, loss: Tensor, weight: Tensor | float | None = None) -> None:
        """Add this micro-batch's gradients.

        Args:
            loss: a mean over samples, one element.
            weight: number of elements that the loss is a mean over, where that is not the number
                of samples: valid tokens, say. The update is then the mean over all elements of
                the batch. A loss of weight 0 must still be finite.

        Raises:
            PhaseloopError: called in a test phase, or before the step took its batch.
        """
        batch = self.batch
        if not self.train or batch is None:
            raise PhaseloopError(
                "backward() belongs after next_batch() in a train phase; "
                "guard it with `if task.train:`"
            )
        self.accumulator.weigh(loss, batch, weight).backward()  # type: ignore[no-untyped-call]
        self.hooks.on_backward(self)

    def update(self) -> None:
        """Move the parameters, if the window is full; before that, nothing."""
        if self.train and self.accumulator.full and not self.accumulator.applied:
            apply_update(self)

    # --- what hooks and steps may also say ---

    def record(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Log a scalar: the mean since the last log point, weighted.

        A tensor stays on the device until the log point; a tensor with a graph is detached.

        Raises:
            ConfigError: the tensor has more than one element.
        """
        if isinstance(value, Tensor):
            self.recorder.add(name, _scalar(value, f"record({name!r})"), weight)
        else:
            self.recorder.add(name, torch.tensor(float(value), device=self.device), weight)

    def skip_update(self, reason: str) -> None:
        """In ``on_gradients``: leave the parameters as they are at this window."""
        self.skip_reason = reason

    def compute_metrics(self) -> None:
        """Sync the meters of the phase at hand over processes and read them, once per phase."""
        self.phase.metrics = self.meters.compute()
        self.metrics.update(self.phase.metrics)
        for name, value in self.phase.metrics.items():
            self._keep_best(name, value)

    def direction(self, metric: str) -> bool | None:
        """Whether a higher value of a metric (``test/accuracy``) is better; None: not known."""
        meters = self.meter_sets.get(metric.split("/")[0])
        return meters.direction(metric) if meters is not None else None

    def raw_state(self) -> dict[str, Any]:
        """The model's own parameters and buffers, also where a test has put others in."""
        return self.swapping.raw_state()

    def parameter_names(self) -> dict[int, str]:
        """``id`` of every parameter to its name; the criterion's begin with ``criterion.``."""
        return parameter_names(self._named_modules())

    def _named_modules(self) -> dict[str, nn.Module]:
        """Prefix of parameter names to the module that has them."""
        modules = {"": self.bare_model}
        if isinstance(self.criterion_module, nn.Module):
            modules["criterion"] = self.criterion_module
        return modules

    @property
    def at_border(self) -> bool:
        """Every window is closed: the state is whole and may be saved."""
        return self.accumulator.closed or not self.train

    # --- start ---

    def build(self) -> None:
        """Put everything on the device and plan the run; reads no sample.

        Raises:
            PhaseloopError: called again: what a run leaves behind is no start for another.
        """
        assembly.build(self)

    def find_parameters(self) -> None:
        """Look up which parameters the optimizers move, again after a group was added.

        Raises:
            PhaseloopError: one of them has no name, since it is neither the model's nor the
                criterion's.
        """
        names = self.parameter_names()
        for optimizer in self.optimizers.values():
            check_names(optimizer, names)
        self.trainable = optimized(self.optimizers)
        self.groups = count_groups(self.optimizers)

    def take_added_groups(self) -> None:
        """At a window's start: move what a hook has added to an optimizer, to unfreeze it, say.

        What its parameters gathered while no optimizer had them is no part of any update.
        """
        if count_groups(self.optimizers) != self.groups:
            self.find_parameters()
            clear(self.trainable)

    def seed_all(self) -> None:
        """Start every generator of this process afresh, from the seed and the rank alone."""
        seed = rng.mix(self.seed, rng.START, self.backend.rank)
        rng.seed_host(seed)
        self.backend.seed_device(seed)

    def small_state(self) -> dict[str, Any]:
        """Copies of everything of a checkpoint that a test phase may change."""
        return copy.deepcopy(small_state(self))

    def forget_test_draws(self) -> None:
        """Set every generator to where the test phase found it.

        So the training is the same however often it is tested, whatever a test draws.
        """
        if self.random_before_test is not None:
            states = self.random_before_test[self.backend.rank]
            rng.set_host_state(states["host"])
            self.backend.set_rng_state(states["device"])
            self.random_before_test = None

    def close(self) -> None:
        """End worker processes and leave the other processes."""
        self.drop_batches()  # they hold on to the workers
        for loader in self.loaders.values():
            loader.close()
        self.backend.teardown()

    def _measure_parts(self, parts: Mapping[str, Tensor], weight: float) -> None:
        named = {name: _scalar(part, "criterion") for name, part in parts.items() if name != "loss"}
        self.meters.add_parts(named, weight)
        if self.train:
            for name, part in named.items():
                self.recorder.add(f"loss/{name}", part, weight)

    def _keep_best(self, name: str, value: float) -> None:
        higher = self.direction(name)
        if higher is None or value != value:  # a NaN is never best
            return
        best = self.best.get(name)
        if best is None or (value > best if higher else value < best):
            self.best[name] = value


def _scalar(value: Tensor, key: str) -> Tensor:
    """``value`` without its graph, in shape []."""
    if value.numel() != 1:
        raise ConfigError(
            key, f"a tensor of shape {list(value.shape)} is not one number; take its mean"
        )
    return value.detach().reshape(())
