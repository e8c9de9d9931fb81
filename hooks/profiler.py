"""Hook ``profiler``: torch's profiler on chosen updates, as a trace and a table of operations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction, profile

log = logging.getLogger("phaseloop")


@register_hook("profiler")
class Profiler(Hook):
    """Watches updates ``first`` to ``last`` and writes, into the run's folder,
    ``profile/rank0_updates_11-15.pt.trace.json``, which Perfetto (ui.perfetto.dev) and
    TensorBoard's profiler plugin read, and beside it, as ``.txt``, the operations that took
    longest. ``ProfilerStep#11`` is update 11; ``phaseloop forward``, ``phaseloop hook NAME`` and so
    on are the parts that the hook ``timing`` has. A test or a save between these updates is in it.

    The training is the same to the bit. Updates that a resumed run has behind it are not watched;
    those that are left of them are.

    Args:
        updates: the first and the last.
        warmup: so many updates before the first are watched and thrown away, since the profiler's
            own start takes time in them.
        ranks: of several processes, those that write a trace.
        record_shapes: also the shapes of each operation's inputs; in the table, too.
        with_stack: also the Python lines that operations were called from: slow.
        profile_memory: also what operations allocate and free.
        rows: of the table.
        folder: name of the folder in the run's folder.

    Raises:
        ConfigError: a number is out of range.
    """

    order = Order.CHECKPOINT - 1  # an update ends when all that it did is logged
    only_watches = True

    def __init__(
        self,
        updates: Sequence[int] = (11, 15),
        warmup: int = 1,
        ranks: Sequence[int] = (0,),
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        rows: int = 30,
        folder: str = "profile",
    ) -> None:
        self.first, self.last = _pair(updates)
        for name, value, least in (("warmup", warmup, 0), ("rows", rows, 1)):
            if value < least:
                raise ConfigError(f"hooks.profiler.{name}", f"{value} is less than {least}")
        if not ranks or min(ranks) < 0:
            raise ConfigError("hooks.profiler.ranks", f"{list(ranks)!r} names no process")
        self.warmup = warmup
        self.ranks = list(ranks)
        self.options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "with_stack": with_stack,
            "profile_memory": profile_memory,
        }
        self.rows = rows
        self.folder = folder
        self._place: Path | None = None
        self._running: _Running | None = None
        self._ranges = _Ranges()

    def on_start(self, task: Task) -> None:
        self._place = self._running = None
        processes, planned = task.backend.world_size, task.stages.updates
        if max(self.ranks) >= processes:
            raise ConfigError(
                f"hooks.{self.name}.ranks",
                f"there is no rank {max(self.ranks)}: the run has {processes} "
                f"process{'es' if processes > 1 else ''}, 0 to {processes - 1}",
            )
        if task.test_only or task.backend.rank not in self.ranks:
            return
        if task.folder is None:
            if task.primary:
                log.info("hooks.%s: the run has no folder; nothing is profiled", self.name)
        elif task.progress.updates < self.last:
            self._place = Path(task.folder.path) / self.folder
            task.parts.watch(self._ranges)
            if all(plan.updates for plan in task.stages.plans()) and planned < self.first:
                log.warning(
                    "hooks.%s.updates: the run ends at update %d, before %d: nothing is profiled",
                    self.name, planned, self.first,
                )  # fmt: skip

    def on_resume(self, task: Task) -> None:
        self._begin_if_due(task)

    def on_phase_start(self, task: Task) -> None:
        if task.train:
            self._begin_if_due(task)

    def on_step(self, task: Task) -> None:
        if not task.updated:
            return
        if self._running is None:
            self._begin_if_due(task)
        elif task.progress.updates >= self.last:
            self._end(task)
        else:
            self._running.step()

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._end(task)

    def _begin_if_due(self, task: Task) -> None:
        following = task.progress.updates + 1
        if self._place is None or self._running is not None:
            return
        if self.first - self.warmup <= following <= self.last:
            self._running = _Running(task, self, following)
            self._ranges.on = True

    def _end(self, task: Task) -> None:
        """Write what there is: the run may end, or break off, before the last of the updates."""
        task.parts.unwatch(self._ranges)
        self._ranges.on = False
        running, place, self._running, self._place = self._running, self._place, None, None
        if running is not None and place is not None:
            running.end(task, place)


class _Running:
    """One profile, from the first update that is watched on."""

    def __init__(self, task: Task, options: Profiler, update: int) -> None:
        from torch.profiler import ProfilerActivity, profile, supported_activities

        self._options = options
        self._from = max(update, options.first)
        self._update = update
        activities = [ProfilerActivity.CPU]
        if task.device.type != "cpu" and ProfilerActivity.CUDA in supported_activities():
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile = profile(
            activities=activities, schedule=self._action, acc_events=True, **options.options
        )
        self._profile.step_num = update  # names it ProfilerStep#UPDATE in the trace
        self._profile.start()

    def _action(self, step: int) -> ProfilerAction:
        from torch.profiler import ProfilerAction

        update = step or self._update  # it is asked for step 0 when it is made
        # Until it is stopped: after a roll-back it takes more steps than there are updates.
        return ProfilerAction.WARMUP if update < self._from else ProfilerAction.RECORD

    def step(self) -> None:
        """The next update begins."""
        self._profile.step()

    def end(self, task: Task, place: Path) -> None:
        """Write the trace and the table."""
        self._profile.stop()
        to = min(task.progress.updates, self._options.last)
        if to < self._from:  # no whole update was watched
            return
        place.mkdir(parents=True, exist_ok=True)
        stem = f"rank{task.backend.rank}_updates_{self._from}-{to}"
        trace, table = place / f"{stem}.pt.trace.json", place / f"{stem}.txt"
        self._profile.export_chrome_trace(str(trace))
        table.write_text(self._table(task) + "\n")
        log.info("profile of updates %d to %d: %s; by operation: %s", self._from, to, trace, table)

    def _table(self, task: Task) -> str:
        by_shape = self._options.options["record_shapes"]
        averages = self._profile.key_averages(group_by_input_shape=by_shape)
        on = "self_cpu_time_total" if task.device.type == "cpu" else "self_cuda_time_total"
        return averages.table(sort_by=on, row_limit=self._options.rows)


class _Ranges:
    """Watches the parts of the run, and names them in the trace while a profile is made.

    From the start of the run on, since the step at hand cannot be wrapped within a phase.

    Attributes:
        on: a profile is being made.
    """

    def __init__(self) -> None:
        self.on = False
        self._open: list[record_function | None] = []

    def enter(self, part: str) -> None:
        """A part begins."""
        one = None
        if self.on:
            one = record_function("phaseloop " + part.replace("/", " ", 1))
            one.__enter__()
        self._open.append(one)

    def leave(self, part: str) -> None:
        """It ends; one that began before anybody watched is not known here."""
        one = self._open.pop() if self._open else None
        if one is not None:
            one.__exit__(None, None, None)

    def between(self) -> None:
        """Another phase: that is no range of its own."""

    def phase(self, name: str) -> None:
        """Likewise."""


def _pair(updates: Sequence[int]) -> tuple[int, int]:
    given = list(updates) if isinstance(updates, Sequence) else updates
    whole = isinstance(given, list) and all(isinstance(n, int) for n in given)
    if not whole or len(given) != 2 or not 1 <= given[0] <= given[1]:
        raise ConfigError(
            "hooks.profiler.updates", f"give the first and the last, as [11, 15]; got {given!r}"
        )
    return given[0], given[1]
