"""The closing table: how a run has ended, what came of it, and where things are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phaseloop.engine.checkpoint.names import position
from phaseloop.engine.data.stream import StreamLoader
from phaseloop.engine.phases import LENGTHS, TRAIN
from phaseloop.engine.report import Rows, counted, duration, number, share, speed
from phaseloop.engine.run_folder import LOG, METRICS
from phaseloop.engine.spent import SAVING, TESTING, TRAINING, WAITING, Spent

if TYPE_CHECKING:
    from phaseloop.engine.task import Task
    from phaseloop.engine.trainer import Outcome

_INSIDE = ("curves.png", METRICS, "tensorboard/", LOG)
_TIMES = {1: "once", 2: "twice"}


@dataclass
class Account:
    """What is remembered of a run, from one of its processes to the next.

    Attributes:
        spent: where its time has gone.
        samples: training samples that were gone through in that time.
        resumes: how often it was resumed.
        whole: all of the run is in it; else what came before this process is not known.
        best_at: by metric, the update of its best value (None: nobody knows), and that value.
    """

    spent: Spent = field(default_factory=Spent)
    samples: int = 0
    resumes: int = 0
    whole: bool = True
    best_at: dict[str, tuple[int | None, float]] = field(default_factory=dict)


def ended(task: Task, outcome: Outcome, account: Account) -> Rows:
    """Of a run that was finished, stopped, or has failed."""
    if task.test_only:
        return [("tested", task.resumed_from), *_results(outcome, account.best_at)]
    done = [counted(outcome.updates, "update"), counted(_epochs(task), "epoch")]
    if outcome.status == "failed":
        done = [f"after {done[0]}"]
    rows = [(outcome.status, ", ".join([*done, *_circumstances(task, outcome, account)]))]
    if outcome.status != "failed":
        rows += [("reason", outcome.reason)] if outcome.reason else []
        rows += _results(outcome, account.best_at)
        rows += _time(account)
    if outcome.status == "failed" or outcome.signal is not None:
        rows += _to_go_on(task)
    return rows + _places(task)


def nothing_done(task: Task, outcome: Outcome, account: Account) -> Rows:
    """Of a run that was over before."""
    amount = f"after {counted(outcome.updates, 'update')}"
    if outcome.status == "finished":
        lengths = {name: getattr(task.phases, name) for name in LENGTHS}
        stage = f"{task.stages.given[task.progress.stage].name}." if task.stages.several else ""
        keys = [f"phases.{stage}{key} (now {n})" for key, n in lengths.items() if n is not None]
        first = ("already finished", f"{amount}: nothing to do")
        more = f"the same command with a larger {' or '.join(keys)}"
    else:
        first = ("already stopped", f"{amount}: {outcome.reason}")
        more = "the same command with the setting changed that the reason names"
        loader = task.loaders[TRAIN]
        if isinstance(loader, StreamLoader) and loader.used_up:
            more = f"there is nothing to go on with: {loader.key} is used up"
    anew = "another run.dir, or run.resume=never, which puts this run aside"
    rows = [first, *_results(outcome, account.best_at), ("to go on", more)]
    return [*rows, ("to start anew", anew), *_places(task)]


def _circumstances(task: Task, outcome: Outcome, account: Account) -> list[str]:
    """How long it took, and what was out of the ordinary."""
    if account.whole:
        parts = [duration(account.spent.total)]
        if account.resumes:
            times = _TIMES.get(account.resumes, f"{account.resumes:,} times")
            parts = [f"{parts[0]} in all", f"resumed {times}"]
    else:
        parts = [f"{duration(outcome.seconds)} since the resume"]
    if skipped := task.progress.skipped:
        parts.append(f"{counted(skipped, 'update')} skipped")
    if backs := task.progress.roll_backs:
        parts.append(counted(backs, "roll-back"))
    return parts


def _results(outcome: Outcome, best_at: Mapping[str, tuple[int | None, float]]) -> Rows:
    """The last value of every metric, and the best of those whose direction is known."""
    rows: Rows = []
    for name, value in outcome.final.items():
        text = f"{number(value):>8}"
        if (best := outcome.best.get(name)) is not None:
            update, known = best_at.get(name, (None, best))
            at = f"  {update:>9,}" if update is not None and known == best else ""
            text += f"  {number(best):>8}{at}"
        rows.append((name, text))
    if not rows:
        return []
    at = (
        "  at update"
        if any(best_at.get(name, (None,))[0] is not None for name in outcome.best)
        else ""
    )
    return [("", f"{'last':>8}" + (f"  {'best':>8}{at}" if outcome.best else "")), *rows]


def _time(account: Account) -> Rows:
    """What each part of the run has taken, and how fast the training went."""
    seconds = account.spent.seconds
    training = seconds[TRAINING]
    rows: Rows = []
    if account.samples > 0 and training > 0:
        rate = speed(account.samples / training)
        wait = f"data wait {share(seconds[WAITING] / training).strip()}"
        rows.append((TRAINING, f"{duration(training)}, {rate}, {wait}"))
    return rows + [(p, duration(seconds[p])) for p in (TESTING, SAVING) if seconds[p] > 0]


def _to_go_on(task: Task) -> Rows:
    if task.store is None or not (names := task.store.names()):
        return []
    return [("to go on", f"the same command, from update {position(names[-1])[0]:,}")]


def _places(task: Task) -> Rows:
    """Where things are; only what is there."""
    if task.folder is None:
        return []
    root, checkpoints = Path(task.folder.path), task.folder.checkpoints
    rows = [("run folder", str(root))]
    saved = task.store is not None and bool(task.store.names())
    inside = ["checkpoints/"] if saved and not task.folder.elsewhere else []
    inside += [name for name in _INSIDE if (root / name).exists()]
    if inside:
        rows.append(("in it", ", ".join(inside)))
    if saved and task.folder.elsewhere:
        rows.append(("checkpoints", str(checkpoints)))
    return rows


def _epochs(task: Task) -> int:
    """Epochs completed."""
    return task.progress.epoch - task.progress.epoch_open
