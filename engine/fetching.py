"""Fetching: the next micro-batch, or those of a whole window, and what an interruption leaves.

An error or a signal finds the state whole as long as the window has not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from phaseloop.engine.accumulator import Accumulator
from phaseloop.engine.backends import Backend
from phaseloop.engine.committing import Committing
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import DataError
from phaseloop.engine.phases import Phase
from phaseloop.engine.recorder import Recorder
from phaseloop.engine.sharing import whole_window
from phaseloop.engine.signals import Interrupted, Signals

if TYPE_CHECKING:
    from phaseloop.engine.agreement import Agreement
    from phaseloop.engine.step_facts import StepFacts
    from phaseloop.engine.window_start import WindowStart


class Fetching(Committing):
    """The part of a task that gets the batches.

    Attributes:
        updated: this step closed an update that counted.
        loss: the step's loss; detached by ``commit``.
        output: the model's output, until the end of the step.
        batch: the batch that the step took.
        step_is_empty: the collate function gave None for all that the step was to take.
        failed_whole: an error came while the first micro-batch of a window was fetched: nothing
            has moved since the last step that every hook has seen to its end.
        window_start: puts aside what a window may change, for whoever may redo it; None: nobody.
        agreement: what several processes decide together; None: there is one.
        may_redo: on several processes, this window may be begun anew: nothing is reduced before it
            is whole on all.
        before_reduce: called then, on all.
        waited: seconds that the training of this process stood still for its data: until a worker
            had it, or until it was read here.
    """

    backend: Backend
    phase: Phase
    train: bool
    loaders: dict[str, AnyLoader]
    recorder: Recorder
    accumulator: Accumulator
    signals: Signals
    step_facts: StepFacts

    def __init__(self) -> None:
        super().__init__()
        self.updated = False
        self.loss: torch.Tensor | None = None
        self.output: Any = None
        self.batch: Batch | None = None
        self.step_is_empty = False
        self.failed_whole = False
        self.window_start: WindowStart | None = None
        self.agreement: Agreement | None = None
        self.may_redo = False
        self.before_reduce: Callable[[], None] | None = None
        self.waited = 0.0
        self._pending: Batch | None = None
        self._window: list[Batch] = []
        self._batches: Iterator[tuple[Window, Batch | None]] | None = None

    def has_batch(self) -> bool:
        """Fetch the next micro-batch; False: the phase is done, a test is due, or a stop agreed."""
        self.output = self.batch = self.loss = None
        self.updated = False
        self.recorder.begin_step()
        if self.accumulator.closed and not self._goes_on():
            return False
        return self._fetch()

    def _fetch(self) -> bool:
        accumulator = self.accumulator
        began = perf_counter()
        try:
            if self._batches is None:
                progress, phase = self.progress, self.phase
                first = progress.windows if phase.train else phase.position
                self._batches = self.loaders[phase.name].batches(
                    progress.epoch, progress.roll_backs, first
                )
            # Only with the window closed is there a border to stop at without this batch; and of
            # several processes none stops there alone.
            self.signals.waiting = accumulator.closed and self.agreement is None
            window, batch = next(self._batches)
        except Interrupted:
            self._batches = None
            self.loaders[self.phase.name].put_back()
            return False
        except Exception:
            self.failed_whole = accumulator.closed
            raise
        finally:
            self.signals.waiting = False
        if self.train:
            self.waited += perf_counter() - began
        if accumulator.closed:
            accumulator.begin(window)
            if self.train:
                self.take_added_groups()
            if self.window_start is not None:
                self.window_start.put_aside()
        accumulator.taken += 1
        if self.agreement is not None:
            self._tell_others(self.agreement, batch)
        if self.step_facts.takes_window:
            began = perf_counter()
            batches = [batch, *(next(self._batches)[1] for _ in window.pieces[1:])]
            if self.train:
                self.waited += perf_counter() - began
            accumulator.taken = len(batches)
            self._window = [batch for batch in batches if batch is not None]
            self.step_is_empty = not self._window
        else:
            self._pending = batch
            self.step_is_empty = batch is None
        return True

    def _tell_others(self, agreement: Agreement, batch: Batch | None) -> None:
        """A micro-batch begins, on several processes."""
        accumulator = self.accumulator
        window = accumulator.window
        if self.train and self.backend.hears_of_pieces:
            alike = window.ahead is None and window.samples % self.backend.world_size == 0
            self.backend.begin_piece(alike)
        if accumulator.taken == 1:
            if accumulator.window.ahead is not None:
                accumulator.window = whole_window(self, accumulator.window)  # type: ignore[arg-type]
            agreement.begin(accumulator.window)
            if self.train:
                self.begin_shared_window()
        if batch is None and (self.train or self.backend.collective_forward):
            what = f"update {self.progress.updates + 1}" if self.train else "a batch of the test"
            raise DataError(
                f"{self.loaders[self.phase.name].key}: the collate function gave None for {what} "
                f"on rank {self.backend.rank}. Of several processes each has to have its part of "
                f"it; leave such samples out of the dataset"
            )
        if self.train:
            self.backend.sync_gradients(accumulator.full)

    def drop_attempt(self) -> None:
        """Let go of what the attempt at a window holds: batches, output, loss."""
        self.output = self.batch = self.loss = self._pending = self._batches = None
        self._window, self._skips = [], []
        self.accumulator.begin_pass()

    def fetch_again(self) -> None:
        """Begin the window at hand anew, in the pieces that its loader cuts it into now.

        Its first micro-batch is fetched, as :meth:`has_batch` does; ``window_start`` has put back
        what the attempt before has changed.
        """
        loader = self.loaders[self.phase.name]
        # Open from here on: waiting for the data is no border that a signal could end the run at.
        self.accumulator.begin(loader.window_again(self.progress.epoch, self.phase.position))
        self._fetch()

    @property
    def batches_at_hand(self) -> list[Batch]:
        """What the step has taken or was to take: a micro-batch, or those of a whole window."""
        if self.failed_whole:
            return []
        batch = self.batch if self.batch is not None else self._pending
        return list(self._window) or ([] if batch is None else [batch])

    def _goes_on(self) -> bool:
        """There is another window before the next border; implemented by the walk."""
        raise NotImplementedError

    def begin_shared_window(self) -> None:
        """What several processes do before a window of the training; implemented by the task."""
        raise NotImplementedError

    def take_added_groups(self) -> None:
        """Move what a hook has added to an optimizer; implemented by the task."""
        raise NotImplementedError
