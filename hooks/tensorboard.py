"""Hook ``tensorboard``: all that a run says of itself, as event files in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from phaseloop.engine import event_files
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.histograms import Histogram
from phaseloop.engine.hyper_parameters import hyper_parameters
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import Throughput
from phaseloop.engine.shown import HISTOGRAM, IMAGE, TEXT
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Under which name the things of a kind are in a checkpoint.
_KINDS = {IMAGE: "images", HISTOGRAM: "histograms", TEXT: "texts"}


@register_hook("tensorboard", default=True)
class TensorBoard(Hook):
    """Everything over the number of updates; docs/logging.md lists the names.

    Scalars: log points, metrics of phases and the best of them, samples per second, what saves
    cost. What ``task.record_image``, ``record_histogram`` and ``record_text`` were given, under
    its name. The configuration as a text, and its values among the hyper-parameters.

    A resume tells TensorBoard to drop what the interrupted run wrote after the checkpoint; old
    event files stay as they are. Rows of the checkpoint's own update come in several writes (log
    point, end of the epoch, tests), and the checkpoint may have been made between them: so it
    keeps those that it had, they are dropped and written once more.

    Args:
        folder: name of the folder in the run's folder.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._update = 0
        self._scalars: dict[str, float] = {}  # written at that update
        self._things: dict[tuple[str, str], Any] = {}  # likewise, by kind and name
        self._config = ""  # the configuration as it was last written
        self._started = 0.0
        self._speed = Throughput()

    def on_start(self, task: Task) -> None:
        if task.folder is None or not task.primary:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = Path(task.folder.path) / self.folder
        event_files.make_older(path)
        event_files.wait_for_a_later_name(path)
        # Without a checkpoint to resume from, a run that was killed early may still have left rows.
        purge = task.progress.updates + 1 if task.resumed else 0
        self._writer = SummaryWriter(str(path), purge_step=purge)
        for kind, sinks in task.shown.sinks.items():
            sinks.append(self._sink(kind))
        self._started = time.time()
        if not task.resumed:
            self._begin(task, self._writer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._update, self._scalars = state["update"], dict(state["scalars"])
        self._things = {
            (kind, name): Histogram(*thing) if kind == HISTOGRAM else thing
            for kind, key in _KINDS.items()
            for name, thing in state.get(key, {}).items()
        }
        self._config = state.get("config", "")
        self._started = state.get("started", self._started)
        if self._writer is not None:
            self._write_anew(self._writer)

    def on_resume(self, task: Task) -> None:
        if self._writer is not None:
            self._begin(task, self._writer)

    def state_dict(self) -> dict[str, Any]:
        # A resume does not write again what the checkpoint counts as written: to the file with it.
        if self._writer is not None:
            self._writer.flush()
        state: dict[str, Any] = {"update": self._update, "scalars": dict(self._scalars)}
        for (kind, name), thing in self._things.items():
            plain = [thing.facts, thing.counts] if kind == HISTOGRAM else thing
            state.setdefault(_KINDS[kind], {})[name] = plain
        return {**state, "config": self._config, "started": self._started}

    def files(self) -> list[Path]:
        if self._writer is None:
            return []
        return sorted(Path(self._writer.get_logdir()).glob("*.tfevents.*"))

    def on_phase_start(self, task: Task) -> None:
        if not task.train:
            self._speed.pause()

    def on_step(self, task: Task) -> None:
        if task.recorder.events:
            self._write_saves(task.recorder.events)
        if task.recorder.due and task.train and self._writer is not None:
            scalars = {_tag(k): v for k, v in task.recorder.row().items() if k != "time"}
            speed = self._speed.rate(task.progress.samples)
            if speed is not None:
                scalars["speed/samples_per_second"] = speed
            self._speed.start(task.progress.samples)
            self._add(task, scalars)

    def on_phase_end(self, task: Task) -> None:
        self._write_saves(task.recorder.events)
        metrics = task.phase.metrics
        if task.train:  # train/loss is the curve of the log points
            self._add(task, {f"epoch/{name}": value for name, value in metrics.items()})
        else:
            best = {f"best/{name}": task.best[name] for name in metrics if name in task.best}
            self._add(task, {**metrics, **best})
            self._speed.go_on()
        if self._writer is not None:
            self._writer.flush()

    def on_end(self, task: Task, outcome: Outcome) -> None:
        if self._writer is not None:
            self._write_saves(task.recorder.waiting)
            self._writer.close()
            if outcome.signal is None:  # else it will go on
                path = Path(self._writer.get_logdir())
                event_files.end_session(path, succeeded=outcome.status != "failed")
            self._writer = None

    def _begin(self, task: Task, writer: SummaryWriter) -> None:
        """Of a run that goes on the configuration is written where it has changed."""
        self._speed.start(task.progress.samples)
        parameters = hyper_parameters(task)
        event_files.begin_session(Path(writer.get_logdir()), parameters, self._started)
        config = yaml.safe_dump(task.config, sort_keys=False) if task.config else ""
        if config != self._config:
            self._config = config
            self._show(TEXT, "config", f"```yaml\n{config}```", task.progress.updates)

    def _write_saves(self, events: list[dict[str, Any]]) -> None:
        """What saves cost. It is about this machine, and so in no checkpoint."""
        for event in events:
            if event["event"] == "save" and self._writer is not None:
                for name in ("bytes", "stall", "seconds"):
                    self._writer.add_scalar(f"save/{name}", event[name], event["update"])

    def _add(self, task: Task, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        self._go_to(task.progress.updates)
        self._scalars.update(scalars)
        self._write(scalars)

    def _sink(self, kind: str) -> Any:
        return lambda name, thing, update: self._show(kind, name, thing, update)

    def _show(self, kind: str, name: str, thing: Any, update: int) -> None:
        if self._writer is None:
            return
        self._go_to(update)
        twice = (kind, name) in self._things
        self._things[kind, name] = thing
        if twice:  # the later one takes its place
            self._write_anew(self._writer)
        else:
            self._write_thing(kind, name, thing)

    def _go_to(self, update: int) -> None:
        if self._update != update:
            self._update, self._scalars, self._things = update, {}, {}

    def _write_anew(self, writer: SummaryWriter) -> None:
        """What the update at hand has, and nothing else of it."""
        event_files.drop_from(writer, self._update)
        self._write(self._scalars)
        for (kind, name), thing in self._things.items():
            self._write_thing(kind, name, thing)

    def _write(self, scalars: Mapping[str, float]) -> None:
        assert self._writer is not None
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, self._update)

    def _write_thing(self, kind: str, name: str, thing: Any) -> None:
        assert self._writer is not None
        if kind == IMAGE:
            self._writer.add_image(name, thing, self._update, dataformats="HWC")
        elif kind == TEXT:
            event_files.add_text(self._writer, name, thing, self._update)
        else:
            least, greatest, number, total, squares = thing.facts.tolist()
            self._writer.add_histogram_raw(
                name, least, greatest, number, total, squares,
                thing.limits().tolist(), thing.counts.tolist(), self._update,
            )  # fmt: skip


def _tag(name: str) -> str:
    """The loss and its parts are the training's; other recorded names stand for themselves."""
    return f"train/{name}" if name == "loss" or name.startswith("loss/") else name
