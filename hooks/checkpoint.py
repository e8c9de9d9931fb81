"""Hook ``checkpoint``: when to save, and which checkpoints to keep."""

import logging
import time
from pathlib import Path
from typing import Any

from phaseloop.engine.checkpoint import contents, store
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.ranking import Ranking
from phaseloop.engine.registry import register_hook
from phaseloop.engine.run_folder import ONLY_FILE
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@register_hook("checkpoint", default=True)
class Checkpoint(Hook):
    """Saves after epochs, updates or minutes, after a test that brought a new best, and at the end.

    The newest checkpoint and the best are never removed, and only what this run wrote is.

    Args:
        every_epochs: save after every n-th epoch, before and after its test; None: not by epochs.
        every_updates: save after every n-th update.
        every_minutes: save at the first update after so many minutes.
        keep_last: keep the newest n states (of the same update, the last save).
        keep_best: keep the n best by ``metric``; needs ``metric``.
        metric: name, such as ``test/accuracy``.
        mode: ``max`` or ``min``; None: as the metric's meter declares.

    Raises:
        ConfigError: a number is out of range, or ``keep_best`` has no metric.
    """

    order = Order.CHECKPOINT
    only_watches = True
    saves = True

    def __init__(
        self,
        every_epochs: int | None = 1,
        every_updates: int | None = None,
        every_minutes: float | None = None,
        keep_last: int = 1,
        keep_best: int = 0,
        metric: str | None = None,
        mode: str | None = None,
    ) -> None:
        self.every_epochs = every_epochs
        self.every_updates = every_updates
        self.every_minutes = every_minutes
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._check()
        if keep_best and metric is None:
            raise ConfigError("hooks.checkpoint.metric", "keep_best needs the name of a metric")
        self.ranking = None if metric is None else Ranking("hooks.checkpoint", metric, mode)
        # Best first: [score, epoch, updates, name of the checkpoint, which may be gone].
        self.best: list[list[Any]] = []
        self.written: list[str] = []
        self._saved_at = time.monotonic()

    def on_start(self, task: Task) -> None:
        if self.ranking is not None:
            self.ranking.resolve(task)

    def on_resume(self, task: Task) -> None:
        if task.store is None:
            return
        if task.resumed_here:
            # Made inside a test, it holds the state from before that test, without its own name.
            self._note(Path(task.resumed_from).name)
        there = set(task.store.names())
        self.written = [name for name in self.written if name in there]
        self._prune(task.store)

    def on_step(self, task: Task) -> None:
        if not task.updated:
            return
        every, minutes = self.every_updates, self.every_minutes
        by_updates = every is not None and task.progress.updates % every == 0
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        if by_updates or by_time:
            self._save(task)

    def on_phase_end(self, task: Task) -> None:
        score = self.ranking.score(task) if self.ranking is not None else None
        ranked = self.keep_best > 0 and score is not None and self._is_among_best(score)
        if ranked:
            self._rank(task, score)
        if ranked or self._epoch_is_due(task):
            self._save(task)

    def on_loop_end(self, task: Task) -> None:
        # Not on_end: after an error the state may be half-moved, and the last checkpoint stands;
        # and a save that fails here is an error before anyone says that the run is finished.
        if task.changed:
            self._save(task)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": [list(entry) for entry in self.best],
            "by": self._ranked_by,
            "written": list(self.written),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["by"] == self._ranked_by:  # scores of another metric, or direction, are void
            self.best = [list(entry) for entry in state["best"][: self.keep_best]]
        self.written = list(state["written"])

    @property
    def _ranked_by(self) -> list[str | None]:
        return [] if self.ranking is None else self.ranking.by

    def _check(self) -> None:
        least = {"every_epochs": 1, "every_updates": 1, "every_minutes": 0,
                 "keep_last": 1, "keep_best": 0}  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"hooks.checkpoint.{name}", f"{value} is less than {bound}")

    def _epoch_is_due(self, task: Task) -> bool:
        every = self.every_epochs
        if every is None or task.progress.epoch_open:  # a test in the middle of an epoch
            return False
        return task.progress.epoch % every == 0 or task.over

    def _is_among_best(self, score: float) -> bool:
        assert self.ranking is not None
        if score != score:
            return False
        return len(self.best) < self.keep_best or self.ranking.better(score, self.best[-1][0])

    def _rank(self, task: Task, score: float | None) -> None:
        assert self.ranking is not None and score is not None
        progress = task.progress
        name = store.folder_name(progress.updates, progress.saves + 1)
        place = sum(not self.ranking.better(score, entry[0]) for entry in self.best)
        self.best.insert(place, [score, progress.epoch, progress.updates, name])
        del self.best[self.keep_best :]

    def _save(self, task: Task) -> None:
        if task.store is None:
            return
        name = store.folder_name(task.progress.updates, task.progress.saves + 1)
        # Before it is written, so that it knows itself; and with what is removed afterwards, so
        # that a run killed in between still knows that it has to be.
        self._note(name)
        try:
            saved = contents.save(task)
        except BaseException:
            self.written.remove(name)
            raise
        self._saved_at = time.monotonic()
        log.info("saved %s", saved.path.name, extra=ONLY_FILE)
        self._prune(task.store)

    def _prune(self, checkpoints: store.Store) -> None:
        for old in self._doomed():
            checkpoints.remove(old)
            self.written.remove(old)

    def _note(self, name: str) -> None:
        if name not in self.written:
            self.written.append(name)

    def _doomed(self) -> list[str]:
        """What need not be kept now that the newest is written."""
        in_order = sorted(self.written, key=store.position)
        last_of_update = {store.position(name)[0]: name for name in in_order}
        kept = set(list(last_of_update.values())[-self.keep_last :])
        kept.update(entry[3] for entry in self.best)
        return [name for name in self.written if name not in kept]
