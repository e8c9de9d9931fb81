"""Walking through the phases: which comes next, and which batch comes next.

All that a run's position consists of is moved here, at the borders of phases, and in
:meth:`~phaseloop.engine.committing.Committing.commit` after a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import DataError, PhaseloopError
from phaseloop.engine.fetching import Fetching
from phaseloop.engine.freezing import Freezing
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.meter_set import MeterSet
from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.phases import TRAIN, Phase
from phaseloop.engine.progress import Progress
from phaseloop.engine.rolling_back import roll_back
from phaseloop.engine.sharing import has_pass, tell_left_out
from phaseloop.engine.signals import Interrupted
from phaseloop.engine.swapping import Swapping

if TYPE_CHECKING:
    from phaseloop.engine.precision import Precision
    from phaseloop.engine.stages import Stages
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

NO_ROLL_BACK = (
    "a roll-back goes on with the data in another order, and a stream comes in its own order only"
)

_HOPELESS = 20  # so many windows skipped in a row may still be a loss scale that settles
_ENDLESS = 1000  # so many in a row are hopeless in a pass that nobody knows the end of


class Walk(Fetching):
    """The part of a task that moves.

    Attributes:
        phase: the phase at hand.
        train: it is a train phase.
        meters: the meters of the phase at hand.
        stop_reason: why the run is to stop; empty: it is not.
        stop_asked: the same, until the run has stopped for it: a checkpoint has it, so that
            another process stops there too. Empty also where who asked asks again at a resume.
        stop_saved: the last checkpoint has one.
        test_entry: in a test phase, the small state from just before it.
        random_before_test: the random states of this process from there, until the phase is left:
            draws of phase-end hooks are the test's too.
        changed: something has moved since the last checkpoint was written or read.
        asked_end: on several processes, by the name of a phase, why its end was asked for here.
    """

    progress: Progress
    plan: PhasePlan
    meter_sets: dict[str, MeterSet]
    meters: MeterSet
    swapping: Swapping
    freezing: Freezing
    model: nn.Module
    bare_model: nn.Module
    trainable: list[nn.Parameter]
    groups: int
    unset_rates: bool
    stages: Stages
    precision: Precision

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase(TRAIN, True, 0, 0)
        self.train = True
        self.stop_reason = self.stop_asked = ""
        self.stop_saved = False
        self.carry: Any = None
        self.asked_end: dict[str, str] = {}
        self._train_carry: Any = None
        self.test_entry: dict[str, Any] | None = None
        self.random_before_test: dict[str, Any] | None = None
        self._train_phase: Phase | None = None
        self._train_batches: Iterator[tuple[Window, Batch | None]] | None = None
        self._train_flags: list[tuple[nn.Module, bool]] = []
        self.changed = False

    # --- between phases ---

    def advance_phase(self) -> bool:
        """Go to the next phase, or back into an interrupted one; False: the run is over."""
        if self.agreement is not None and not self.agreement.stop:
            self.agreement.meet()
        if self.stopping:
            return False
        self.leave_phase()
        progress = self.progress
        if self.plan.keeps_time:
            self._keep_time()  # type: ignore[misc]
        if not progress.tests_due and not progress.epoch_open:
            while self.plan.is_over(progress) and not self._tests_only():
                if not self.stages.go_on():
                    return False
                if self.agreement is not None:
                    self.agreement.patience.begin()
            if self._tests_only() or self.plan.test_due_at_start(progress):
                self.make_tests_due()
        if progress.tests_due:
            self._enter_test(progress.tests_due[0])
        elif progress.epoch_open:
            self._enter_train()
        elif self._data_goes_on():
            self._begin_epoch()
            self._enter_train()
        else:
            return False
        return True

    def _data_goes_on(self) -> bool:
        """There is another epoch; of a stream that shows when its first window is there."""
        loader, progress = self.loaders[TRAIN], self.progress
        if not loader.is_stream or self.plan.epoch_is_unfinished(progress):
            return True
        try:
            self.signals.waiting = self.agreement is None
            goes_on = has_pass(cast("Task", self), loader, progress.epoch + 1)
        except Interrupted:
            loader.put_back()
            return not self.stopping
        finally:
            self.signals.waiting = False
        if not goes_on:
            self.changed = True  # that it is used up is saved too
            self.stop_reason = (
                f"{loader.key} is used up after {progress.updates} updates: the stream gave "
                f"nothing when it was gone through again"
            )
            log.warning("%s", self.stop_reason, extra=ALIKE)
        return goes_on

    def _tests_only(self) -> bool:
        """There is only testing to do, and it is still to be done."""
        return not self.plan.trains and self.progress.tested_at < 0

    @property
    def over(self) -> bool:
        """Nothing is left to do: every update made, every test run."""
        progress = self.progress
        return (
            self.plan.is_over(progress)
            and not progress.epoch_open
            and not progress.tests_due
            and progress.stage + 1 == len(self.stages.given)
        )

    @property
    def stopping(self) -> bool:
        """A stop was agreed: by a signal, or by a request that was not too early."""
        if self.agreement is not None:
            if self.agreement.stop:
                self.signals.reached_border()
            return self.agreement.stop
        if self.signals.received is not None:
            self.signals.reached_border()
            self.stop_reason = self.stop_reason or self.signals.name()
        if not self.stop_reason:
            return False
        self.stop_here(self.stop_saved)
        return True

    def stop_here(self, saved: bool) -> None:
        """The run stops at this border: a process that goes on later is not to stop for it again.

        Args:
            saved: the last checkpoint of some process asks for it still.
        """
        self.changed = self.changed or saved
        self.stop_asked, self.stop_saved = "", False

    def request_stop(self, reason: str, asks_again: bool = False) -> None:
        """Ask for the run to stop at the next border.

        A request before the minimum of epochs or updates is logged and dropped; who asked asks
        again while the reason holds.

        Args:
            reason: why, for the log and the outcome.
            asks_again: who asks does so at a resume too, by itself; else a checkpoint made before
                the border has the request.
        """
        if self.plan.below_minimum(self.progress):
            log.info("a stop was asked for before phases.min_epochs and min_updates: %s", reason)
        elif not self.stop_reason:
            self.stop_reason = reason
            self.stop_asked = "" if asks_again else reason

    def roll_back(self, reason: str, most: int) -> None:
        """In ``on_gradients``: leave this update out, and go on from the last checkpoint.

        Args:
            reason: what has gone wrong.
            most: roll-backs that the run may make before it is an error.
        """
        if self.loaders[TRAIN].is_stream:
            raise PhaseloopError(NO_ROLL_BACK)
        self.skip_update(reason)
        self.roll_back_asked = (reason, most)

    def end_phase(self, reason: str) -> None:
        """End the phase at hand at the next border: the rest of its data is left out.

        Its phase-end hooks are called as ever, and what comes after it comes. In a train phase
        the epoch counts as one. Of several processes it is enough that one asks; all end the phase
        after the next batch.
        """
        if self.agreement is None:
            self.end_here(reason)
        else:
            self.asked_end.setdefault(self.phase.name, reason)

    def end_here(self, reason: str) -> None:
        """The same, on every process of the run."""
        if self.train:
            self.progress.ending = self.progress.ending or reason
        else:
            self.phase.ending = True
        log.info("%s ends early: %s", self.phase.name, reason)
        self.recorder.event("end_phase", update=self.progress.updates, reason=reason)

    def _begin_epoch(self) -> None:
        """The next epoch, or the rest of one that ended early when the run was planned shorter."""
        progress = self.progress
        if not self.plan.epoch_is_unfinished(progress):
            progress.epoch += 1
            progress.windows = progress.epoch_windows = 0
        progress.ended_early = False
        progress.epoch_open = True
        self.meter_sets[TRAIN].reset()
        self.carry = None
        self.asked_end.pop(TRAIN, None)
        self._train_batches = None
        self._train_phase = self._make_train_phase()

    def _make_train_phase(self, fresh: bool = True) -> Phase:
        epoch, windows = self.progress.epoch, self.plan.windows_of_epoch(self.progress)
        return Phase(TRAIN, True, epoch, windows, self.progress.windows, fresh)

    def _enter_train(self) -> None:
        if self._train_phase is None:  # in a new process, in the middle of an epoch
            self._train_phase = self._make_train_phase(fresh=False)
        self.phase = self._train_phase
        self.meters = self.meter_sets[TRAIN]
        self.train = True
        self._batches = self._train_batches
        self.freezing.apply()
        if self.agreement is not None:
            self.wrap_model()
        self.stop_reason = self.stop_reason or self.stop_asked  # before a resume
        torch.set_grad_enabled(True)

    def _enter_test(self, name: str) -> None:
        # A checkpoint made inside a test is one made before it: the test is run again as a whole.
        self.test_entry = self.small_state()
        self.random_before_test = self.test_entry["rng"][0]
        if self.agreement is not None:
            self.agreement.patience.test_begins(name)
            self.model = self.bare_model
            self.equal_buffers()
        self._train_flags = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self._train_carry, self.carry = self.carry, None
        self.meters = self.meter_sets[name]
        self.meters.reset()
        self.asked_end.pop(name, None)
        self.phase = Phase(name, False, self.progress.epoch, self.loaders[name].windows)
        self.train = False
        self._batches = None
        torch.set_grad_enabled(False)

    def leave_phase(self) -> None:
        """Put everything back that the phase at hand changed for itself."""
        if self.train:
            self._train_batches = self._batches
        elif self.agreement is not None:
            self.agreement.patience.test_ends(self.phase.name)
        self._batches = None
        for module, flag in self._train_flags:
            module.training = flag
        self._train_flags = []
        self.swapping.put_back()
        self.test_entry = None
        self.forget_test_draws()
        torch.set_grad_enabled(True)

    def drop_batches(self) -> None:
        """Give up the epoch at hand and the one waiting behind it; nothing is fetched any more."""
        self._batches = self._train_batches = self._train_phase = None

    def _finish_phase(self) -> None:
        """The phase at hand is done; its phase-end hooks are called next."""
        progress = self.progress
        self.changed = True
        if self.train:
            self._check_skips()
            if self.agreement is not None:
                tell_left_out(cast("Task", self))
            progress.epoch_open = False
            progress.ended_early, progress.ending = bool(progress.ending), ""
            self._train_phase = self._batches = None
            if self.plan.test_due_at_epoch_end(progress):
                self.make_tests_due()
        else:
            progress.tests_due = progress.tests_due[1:]
            self.carry = self._train_carry
            self.test_entry = None

    def _check_skips(self) -> None:
        """Without this, a run whose length is in updates might go on for ever."""
        skipped = self.progress.skipped_in_a_row
        length = self.plan.windows_of_epoch(self.progress)
        if skipped >= (max(_HOPELESS, 2 * length) if length < math.inf else _ENDLESS):
            far = ", which is two epochs or more" if length < math.inf else ""
            raise DataError(
                f"the last {skipped} windows were all skipped{far}; the last because "
                f"{self._last_skip}"
            )

    def make_tests_due(self) -> None:
        """Every test set is run before training goes on."""
        self.progress.tests_due = list(self.plan.test_sets)
        self.progress.tested_at = self.progress.updates
        self.progress.tested_seconds = self.progress.seconds

    # --- between batches ---

    def _goes_on(self) -> bool:
        if self.roll_back_asked is not None:
            asked, self.roll_back_asked = self.roll_back_asked, None
            roll_back(cast("Task", self), *asked)
            return False
        phase = self.phase
        if (
            phase.position >= phase.windows
            or phase.ending
            or (self.train and (self.progress.ending or self.plan.length_reached(self.progress)))
        ):
            phase.done = True
            self._finish_phase()
            return False
        if self.train and self.progress.skipped_in_a_row >= _ENDLESS:
            self._check_skips()
        return not (self.stopping or (self.train and self.progress.tests_due))

    def evaluating(self) -> list[nn.Module]:
        """Modules that are in evaluation mode in training, such as a frozen batch norm."""
        if self._train_flags:
            return [module for module, flag in self._train_flags if not flag]
        return [module for module in self.model.modules() if not module.training]

    def forget_test_draws(self) -> None:
        """Set every generator to where the test phase found it; implemented by the task."""
        raise NotImplementedError

    def wrap_model(self) -> None:
        """Let the backend reduce gradients in backward, where it can; implemented by the task."""
        raise NotImplementedError

    def equal_buffers(self) -> None:
        """Every process has the primary's buffers; implemented by the task."""
        raise NotImplementedError

    def skip_update(self, reason: str, *optimizers: str) -> None:
        """Leave an update out; implemented by the task."""
        raise NotImplementedError

    def small_state(self) -> dict[str, Any]:
        """Everything of a checkpoint that a test phase may change; implemented by the task."""
        raise NotImplementedError
