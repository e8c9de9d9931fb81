"""Hook ``checkpoint``: when to save, and which checkpoints to keep."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from phaseloop.engine.backends.primary import on_primary
from phaseloop.engine.checkpoint import contents, store
from phaseloop.engine.checkpoint.writer import Save
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.ranking import Ranking
from phaseloop.engine.registry import register_hook
from phaseloop.engine.run_folder import ONLY_FILE
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@register_hook("checkpoint", default=True)
class Checkpoint(Hook):
    """Saves after epochs, updates or minutes, after a test that brought a new best, at the end,
    and where the next batch cannot be read.

    The newest checkpoint and the best are never removed, and only what this run wrote is.

    In the background, the training stands still while its state is copied; the copy, as large as
    the checkpoint, stays in memory for the next save. One save is in flight: the next one waits
    for it. An error of a save ends the run at the next step, and the run is not over before
    everything is on disk.

    Args:
        every_epochs: save after every n-th epoch, before and after its test; None: not by epochs.
        every_updates: save after every n-th update.
        every_minutes: save at the first update after so many minutes.
        keep_last: keep the newest n states (of the same update, the last save).
        keep_best: keep the n best by ``metric``; needs ``metric``.
        metric: name, such as ``test/accuracy``.
        mode: ``max`` or ``min``; None: as the metric's meter declares.
        keep_every_epochs: keep what is saved at the end of every n-th epoch, for ever.
        keep_every_updates: keep what is saved after every n-th update, for ever.
        background: write while the training goes on; False: the training waits for the disk, and
            no copy is made.

    Raises:
        ConfigError: a number is out of range, ``keep_best`` has no metric, or nothing is saved
            when something is to be kept.
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
        keep_every_epochs: int | None = None,
        keep_every_updates: int | None = None,
        background: bool = True,
    ) -> None:
        self.every_epochs = every_epochs
        self.every_updates = every_updates
        self.every_minutes = every_minutes
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every_epochs = keep_every_epochs
        self.keep_every_updates = keep_every_updates
        self.background = background
        self._check()
        if keep_best and metric is None:
            raise ConfigError("hooks.checkpoint.metric", "keep_best needs the name of a metric")
        self.ranking = None if metric is None else Ranking("hooks.checkpoint", metric, mode)
        # Best first: [score, epoch, updates, name of the checkpoint, which may be gone].
        self.best: list[list[Any]] = []
        self.written: list[str] = []
        self.archived: list[int] = []  # updates after which a checkpoint is kept for ever
        self._saved_at = 0.0

    def on_start(self, task: Task) -> None:
        self._saved_at = task.clock()
        if self.ranking is not None:
            self.ranking.resolve(task)

    def on_resume(self, task: Task) -> None:
        self._tell(task)  # rolled back: a save may just have come to its end
        if task.store is None:
            return
        if task.resumed_here:
            # Made inside a test, it holds the state from before that test, without its own name.
            self._note(Path(task.resumed_from).name)
        there = set(on_primary(task.backend, task.store.names))
        self.written = [name for name in self.written if name in there]
        for name in self._doomed():
            if task.primary:
                task.store.remove(name)
            self.written.remove(name)

    def on_step(self, task: Task) -> None:
        if task.writer.over:
            self._tell(task)
        if not task.updated:
            return
        every, minutes = self.every_updates, self.every_minutes
        by_updates = every is not None and task.progress.updates % every == 0
        by_time = minutes is not None and task.clock() - self._saved_at >= 60 * minutes
        if by_updates or by_time:
            self._save(task)

    def on_phase_end(self, task: Task) -> None:
        if task.writer.over:
            self._tell(task)
        score = self.ranking.score(task) if self.ranking is not None else None
        ranked = self.keep_best > 0 and score is not None and self._is_among_best(score)
        if ranked:
            self._rank(task, score)
        if ranked or self._epoch_is_due(task):
            self._save(task)

    def on_loop_end(self, task: Task) -> None:
        # Not on_end: after an error the state may be half-moved, and the last checkpoint stands;
        # and a save that fails here is an error before anyone says that the run is finished.
        task.signals.reached_border()  # a signal that comes while this last save is made, too
        if task.changed:
            self._save(task)
        self._finish(task)

    def on_exception(self, task: Task, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            task.writer.give_up()  # at once: the checkpoints before it stand
            return
        try:
            self._finish(task)
        finally:  # where that failed, what it held is still there
            # Several processes: the others are in the middle of the next update.
            alone = task.backend.world_size == 1
            if alone and task.failed_whole and task.changed and task.store is not None:
                self._save(task)
                self._finish(task)
                log.info("nothing is lost: all %d updates are saved", task.progress.updates)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": [list(entry) for entry in self.best],
            "by": self._ranked_by,
            "written": list(self.written),
            "archived": list(self.archived),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["by"] == self._ranked_by:  # scores of another metric, or direction, are void
            self.best = [list(entry) for entry in state["best"][: self.keep_best]]
        self.written = list(state["written"])
        self.archived = list(state.get("archived", []))

    @property
    def _ranked_by(self) -> list[str | None]:
        return [] if self.ranking is None else self.ranking.by

    def _check(self) -> None:
        least = {"every_epochs": 1, "every_updates": 1, "every_minutes": 0,
                 "keep_last": 1, "keep_best": 0,
                 "keep_every_epochs": 1, "keep_every_updates": 1}  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"hooks.checkpoint.{name}", f"{value} is less than {bound}")
        for unit in ("epochs", "updates"):
            keep, save = getattr(self, f"keep_every_{unit}"), getattr(self, f"every_{unit}")
            if keep is not None and (save is None or keep % save):
                raise ConfigError(
                    f"hooks.checkpoint.keep_every_{unit}",
                    f"{keep} is no multiple of hooks.checkpoint.every_{unit}, which is "
                    f"{'null' if save is None else save}: there would be nothing to keep",
                )

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
        with task.signals.no_limit():
            self._bring(task)

    def _bring(self, task: Task) -> None:
        assert task.store is not None
        begun = time.perf_counter()
        # One save is in flight: what is waited for it, this one costs.
        task.wait_for_save()
        self._tell(task)
        name = store.folder_name(task.progress.updates, task.progress.saves + 1)
        # Before it is written, so that it knows itself; and with what is removed afterwards, so
        # that a run killed in between still knows that it has to be.
        self._note(name)
        if self._is_for_ever(task) and task.progress.updates not in self.archived:
            self.archived.append(task.progress.updates)
        try:
            collected = contents.collect(task)
            doomed = self._doomed()
            if not task.primary:  # the state of this process is with the primary now
                self.written = [kept for kept in self.written if kept not in doomed]
                contents.count(task)
                self._saved_at = task.clock()
                if not self.background:
                    task.wait_for_save()
                return
            facts, files, then = collected.facts, collected.files, _status(task)
            save = Save(task.store, name, facts, files, doomed, then, begun=begun)
            if self.background:
                task.writer.begin(save, collected.parts, collected.own)
            elif task.agreement is not None:
                task.writer.begin(save, collected.parts, copies=False)
                task.wait_for_save()
            else:
                task.writer.write(save, collected.parts)
        except BaseException:
            self.written.remove(name)
            raise
        if save.saved is not None or self.background or task.agreement is not None:
            contents.count(task)
            self._saved_at = task.clock()
        if not self.background:
            self._tell(task)

    def _finish(self, task: Task) -> None:
        """Wait for the save in flight, which costs that time, and say what came of it."""
        since = time.perf_counter()
        with task.signals.no_limit():
            save = task.writer.settle()
        if save is not None:
            task.writer.count(save, since)
        self._tell(task)

    def _tell(self, task: Task) -> None:
        """Wait for the save in flight and say what came of it.

        Raises:
            CheckpointError: it failed.
        """
        save = task.writer.wait()
        if save is None:
            return
        gone = set(save.doomed)
        if save.saved is None:
            gone, task.changed = {save.name}, True
        else:
            log.info(
                "saved %s (%.1f MB; the training stood still for %.3f s, on disk after %.3f s)",
                save.name, save.bytes / 1e6, save.stalled, save.seconds, extra=ONLY_FILE,
            )  # fmt: skip
            task.recorder.later(
                "save", update=store.position(save.name)[0], checkpoint=save.name,
                bytes=save.bytes, stall=round(save.stalled, 4), seconds=round(save.seconds, 4),
            )  # fmt: skip
        self.written = [name for name in self.written if name not in gone]
        save.check()

    def _is_for_ever(self, task: Task) -> bool:
        progress = task.progress
        if not progress.updates:  # after a test at the start
            return False
        epochs, updates = self.keep_every_epochs, self.keep_every_updates
        by_epochs = epochs is not None and not progress.epoch_open and progress.epoch % epochs == 0
        return by_epochs or (updates is not None and progress.updates % updates == 0)

    def _note(self, name: str) -> None:
        if name not in self.written:
            self.written.append(name)

    def _doomed(self) -> list[str]:
        """What need not be kept now that the newest is written."""
        in_order = sorted(self.written, key=store.position)
        last_of_update = {store.position(name)[0]: name for name in in_order}
        kept = set(list(last_of_update.values())[-self.keep_last :])
        kept.update(entry[3] for entry in self.best)
        kept.update(last_of_update[n] for n in self.archived if n in last_of_update)
        return [name for name in self.written if name not in kept]


def _status(task: Task) -> Callable[[], None] | None:
    """Renews ``status.json``, so that after a kill it says where the run stood."""
    if task.folder is None or task.running_status is None or not task.primary:
        return None
    return partial(task.folder.write_status, task.running_status())
