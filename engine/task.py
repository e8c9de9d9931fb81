"""Task: everything that one training needs, and what a train step says to it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine import assembly, registry, rng
from phaseloop.engine.accumulator import Accumulator
from phaseloop.engine.backends import Backend, joining
from phaseloop.engine.checkpoint.contents import small_state
from phaseloop.engine.checkpoint.optimizer_state import parameter_names
from phaseloop.engine.checkpoint.store import Store
from phaseloop.engine.checkpoint.weights import Weights
from phaseloop.engine.checkpoint.writer import Writer
from phaseloop.engine.data.source import Data
from phaseloop.engine.events import Dispatcher
from phaseloop.engine.freezing import Freezing
from phaseloop.engine.meter_set import MeterSet
from phaseloop.engine.model_options import ModelOptions, release
from phaseloop.engine.parts import Parts
from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.phases import TRAIN, Phases
from phaseloop.engine.precision import Precision
from phaseloop.engine.progress import Progress
from phaseloop.engine.recorder import Recorder
from phaseloop.engine.recording import Recording
from phaseloop.engine.run_folder import RunFolder
from phaseloop.engine.schedules import Rates, Schedule, TorchSchedule
from phaseloop.engine.settings import Debug, Gradients, Run
from phaseloop.engine.shown import Shown
from phaseloop.engine.signals import Signals
from phaseloop.engine.stages import Stage, Stages, stages_of
from phaseloop.engine.stepping import Stepping
from phaseloop.engine.swapping import Swapping
from phaseloop.engine.urls import place, same

log = logging.getLogger("phaseloop")

Schedules = Schedule | TorchSchedule | Sequence[Schedule | TorchSchedule]
MakeOptimizer = Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]]


def _backend() -> Backend:
    """What ``backend=auto`` is."""
    made: Backend = registry.backends.get(joining.usual()).target()
    return made


class Task(Recording, Stepping):
    """Everything of one training: data, model, loss, optimizers, meters, phases, position.

    Args:
        model: the network.
        criterion: called with (output, target), gives the mean loss over the batch, or a mapping
            of named parts whose sum, or whose entry ``loss``, is the loss.
        optimizer: an optimizer, several by name, or a function of the model that makes them.
        every: by the name of an optimizer, how often it steps: 2 is at every second batch; one of
            them has to step at every batch.
        train: training data; None: only testing.
        test: test data: one set, called ``test``, or several by name.
        phases: length and test cadence; or several stages, one after the other.
        schedule: one schedule, or several for different options or groups; or a mapping from an
            optimizer's name to these.
        train_meters, test_meters: name to meter, or to a torchmetrics metric. In the second, a
            mapping under the name of a test set holds that set's own, in place of the others.
        train_step: name of a registered step, or a step itself.
        gradients: clipping, of each optimizer's gradients by themselves; or a mapping from an
            optimizer's name to it.
        freeze: patterns of parameters, or of modules, that are not trained: ``["backbone.*"]``.
        precision: ``float32``, ``bfloat16`` or ``float16`` (autocast), ``float64``; or a
            :class:`Precision`, which may say how losses are scaled.
        model_options: compilation, memory layout, activation checkpointing.
        weights: what the model's tensors are at the start of the run, or just the path of it.
        backend: how to run; None: as one of several processes by ``Ddp``, where a launcher such as
            torchrun has started this one so, by ``Horovod`` where horovodrun has, or ``Xla`` where
            torch_xla has; else this process, on a GPU where there is one.
        seed: of everything random.
        run: the run's folder and how it behaves as a process.
        debug: short cuts for a quick try.
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
        phases: Phases | Sequence[Stage],
        criterion: Callable[..., Any] | None = None,
        optimizer: Optimizer | Mapping[str, Optimizer] | MakeOptimizer | None = None,
        train: Data | None = None,
        test: Data | Mapping[str, Data] | None = None,
        every: Mapping[str, int] | None = None,
        schedule: Schedules | Mapping[str, Schedules] = (),
        train_meters: Mapping[str, Any] | None = None,
        test_meters: Mapping[str, Any] | None = None,
        train_step: str | Callable[[Any], None] = "standard",
        gradients: Gradients | Mapping[str, Gradients] | None = None,
        freeze: Sequence[str] = (),
        precision: str | Precision = "float32",
        model_options: ModelOptions | None = None,
        weights: Weights | str | None = None,
        backend: Backend | None = None,
        seed: int = 0,
        run: Run | None = None,
        debug: Debug | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.run = run or Run()
        self.debug = debug or Debug()
        self.seed = seed
        self.config = dict(config or {})
        self.config_defaults: Mapping[str, Any] = {}  # of keys that an old checkpoint may lack
        self.bare_model = model
        self.criterion_module = criterion
        self.whole_phases = stages_of(phases)
        self.phases: Phases = self.whole_phases[0]
        self.gradients = gradients if gradients is not None else Gradients()
        self.precision = Precision(precision) if isinstance(precision, str) else precision
        self.model_options = model_options or ModelOptions()
        self.weights = Weights(weights) if isinstance(weights, str) else weights
        self.changes_input = self.precision.changes_input or self.model_options.channels_last
        self.backend = backend or _backend()
        self.train_data = train
        self.test_data = dict(test or {}) if isinstance(test, Mapping | None) else {"test": test}
        self.schedules = schedule
        self.given_optimizer = optimizer
        self.given_every = dict(every or {})
        assembly.check(self)
        self.freezing = Freezing(self._named_modules(), freeze)
        self.stages = Stages(self, assembly.shortened(self), train_step)
        self.train_step, self.step_facts = self.stages.steps[0]
        self.rates: dict[str, Rates] = {}
        self.loaders = {}
        self.trainable = []
        self.meter_sets = {TRAIN: MeterSet(TRAIN, train_meters)}
        for name in self.test_data:
            # Every set measures for itself, so each gets meters of its own.
            own = assembly.meters_of(name, test_meters or {}, self.test_data)
            self.meter_sets[name] = MeterSet(name, copy.deepcopy(own))
        self.progress = Progress()
        self.recorder = Recorder(self.run.log_every)
        self.shown = Shown()
        self.signals = Signals(self.run.grace)
        self.swapping = Swapping(model)
        self.averages: dict[str, dict[str, Tensor]] = {}
        self.accumulator = Accumulator(1)
        self.plan = PhasePlan(self.phases, 0, list(self.test_data))
        self.hooks = Dispatcher({})
        self.parts = Parts(self)
        saves = self.run.dir is not None and self.debug.fast is None
        self.folder = RunFolder.of(self.run) if saves else None
        self._store: Store | None = None
        self.test_only = False
        self.resumed = False
        self.resumed_from = ""
        self.before_save: list[Callable[[Task], None]] = []
        self.writer = Writer()
        # What status.json says while the run goes on; given by whoever runs the task.
        self.running_status: Callable[[], dict[str, Any]] | None = None
        self.identity: dict[str, Any] = {}
        self.origins: list[dict[str, str]] = []
        self.metrics: dict[str, float] = {}
        self.best: dict[str, float] = {}

    @property
    def primary(self) -> bool:
        """This process writes shared files and speaks to the console."""
        return self.backend.primary

    @property
    def store(self) -> Store | None:
        """The run's checkpoints; None: nothing is saved."""
        if self.folder is None:
            return None
        if self._store is None or self._store.folder != self.folder.checkpoints:
            self._store = Store(self.folder.checkpoints)
        return self._store

    def wait_for_save(self) -> None:
        """Wait until no save is in flight, all processes together, however long it takes.

        What came of it is still to be told, see :meth:`Writer.wait`.
        """
        if self.agreement is None:
            self.writer.settle()
        else:
            self.agreement.wait_for_primary(self.writer.ended)

    @property
    def resumed_here(self) -> bool:
        """Resumed from a checkpoint of this run, which knows how long the files in the folder were.

        False also where the run was started from another run's checkpoint.
        """
        if self.folder is None or not self.resumed_from:
            return False
        return same(place(self.resumed_from).parent, self.folder.checkpoints)

    @property
    def where(self) -> float:
        """Position in the stage: updates done / updates planned; 1 once it is done.

        0 where no number of updates is planned, since the length is a time.
        """
        plan = self.plan
        return min(1.0, plan.updates_done(self.progress) / plan.updates) if plan.updates else 0.0

    def compute_metrics(self) -> None:
        """Sync the meters of the phase at hand over processes and read them, once per phase."""
        self.phase.metrics = self.meters.compute(self.backend)
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

    def seed_all(self) -> None:
        """Start every generator of this process afresh, from the seed and the rank alone."""
        if self.backend.draws_on_host:
            rng.seed_host(self._start_seed())
        self.seed_device()

    def seed_device(self) -> None:
        """Start the device's generator afresh, likewise."""
        self.backend.seed_device(self._start_seed())

    def _start_seed(self) -> int:
        return rng.mix(self.seed, rng.START, self.backend.rank)

    def host_state(self) -> dict[str, Any]:
        """States of this rank's generators on the host, for a checkpoint."""
        if self.backend.draws_on_host:
            return rng.host_state()
        return rng.host_state_of(self._start_seed())

    def set_host_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        if self.backend.draws_on_host:
            rng.set_host_state(state)

    def small_state(self) -> dict[str, Any]:
        """Copies of everything of a checkpoint that a test phase may change."""
        return copy.deepcopy(small_state(self))

    def forget_test_draws(self) -> None:
        """Set every generator to where the test phase found it.

        So the training is the same however often it is tested, whatever a test draws.
        """
        if self.random_before_test is not None:
            states = self.random_before_test
            self.set_host_state(states["host"])
            self.backend.set_rng_state(states["device"])
            self.random_before_test = None

    def close(self) -> None:
        """End worker processes, leave the other processes, and give the model back as it was."""
        self.drop_batches()  # they hold on to the workers
        for loader in self.loaders.values():
            loader.close()
        release(self.bare_model, self.model_options)
        self.backend.teardown()

    def _keep_best(self, name: str, value: float) -> None:
        higher = self.direction(name)
        if higher is None or value != value:  # a NaN is never best
            return
        best = self.best.get(name)
        if best is None or (value > best if higher else value < best):
            self.best[name] = value
