"""Hook ``tensorboard``: scalars and images as TensorBoard event files in the run's folder."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter

_STEM = "events.out.tfevents."


@register_hook("tensorboard", default=True)
class TensorBoard(Hook):
    """Log points under ``train/loss``, ``lr`` and so on; metrics under ``test/accuracy`` and
    ``epoch/train/loss``; what a save cost under ``save/bytes``, ``save/stall`` and
    ``save/seconds``; what ``task.record_image`` gave, under its name; all over the number of
    updates.

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
        self._images: dict[str, Tensor] = {}  # likewise; uint8 [H, W, C]

    def on_start(self, task: Task) -> None:
        if task.folder is None or not task.primary:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = Path(task.folder.path) / self.folder
        _make_older(path)
        _wait_for_a_later_name(path)
        # Without a checkpoint to resume from, a run that was killed early may still have left rows.
        purge = task.progress.updates + 1 if task.resumed else 0
        self._writer = SummaryWriter(str(path), purge_step=purge)
        task.images.sinks.append(self._add_image)

    def state_dict(self) -> dict[str, Any]:
        # A resume does not write again what the checkpoint counts as written: to the file with it.
        if self._writer is not None:
            self._writer.flush()
        images = {"images": dict(self._images)} if self._images else {}
        return {"update": self._update, "scalars": dict(self._scalars), **images}

    def files(self) -> list[Path]:
        if self._writer is None:
            return []
        return sorted(Path(self._writer.get_logdir()).glob("*.tfevents.*"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._update, self._scalars = state["update"], dict(state["scalars"])
        self._images = dict(state.get("images", {}))
        if self._writer is not None:
            self._write_anew(self._writer)

    def on_step(self, task: Task) -> None:
        if task.recorder.events:
            self._write_saves(task.recorder.events)
        if task.recorder.due and task.train and self._writer is not None:
            self._add(task, {_tag(k): v for k, v in task.recorder.row().items() if k != "time"})

    def on_phase_end(self, task: Task) -> None:
        self._write_saves(task.recorder.events)
        prefix = "epoch/" if task.train else ""  # train/loss is the curve of the log points
        self._add(task, {f"{prefix}{name}": v for name, v in task.phase.metrics.items()})
        if self._writer is not None:
            self._writer.flush()

    def on_end(self, task: Task, outcome: Outcome) -> None:
        if self._writer is not None:
            self._write_saves(task.recorder.waiting)
            self._writer.close()
            self._writer = None

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

    def _add_image(self, name: str, picture: Tensor, update: int) -> None:
        if self._writer is None:
            return
        self._go_to(update)
        twice = name in self._images
        self._images[name] = picture
        if twice:  # the later one takes its place
            self._write_anew(self._writer)
        else:
            self._writer.add_image(name, picture, update, dataformats="HWC")

    def _go_to(self, update: int) -> None:
        if self._update != update:
            self._update, self._scalars, self._images = update, {}, {}

    def _write_anew(self, writer: SummaryWriter) -> None:
        """What the update at hand has, and nothing else of it."""
        _drop_from(writer, self._update)
        self._write(self._scalars)
        for name, picture in self._images.items():
            writer.add_image(name, picture, self._update, dataformats="HWC")

    def _write(self, scalars: Mapping[str, float]) -> None:
        assert self._writer is not None
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, self._update)


def _tag(name: str) -> str:
    """The loss and its parts are the training's; other recorded names stand for themselves."""
    return f"train/{name}" if name == "loss" or name.startswith("loss/") else name


def _drop_from(writer: SummaryWriter, update: int) -> None:
    """Tell readers to forget everything from ``update`` on, as ``purge_step`` does."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    writer._get_file_writer().add_event(Event(session_log=start), step=update)


def _wait_for_a_later_name(path: Path) -> None:
    """Readers take event files in the order of their names: second, host, process. Where another
    file was made in this very second and its name sorts after ours, wait for the next second."""
    second = int(time.time())
    stem = f"{_STEM}{second:010d}."
    mine = f"{stem}{socket.gethostname()}.{os.getpid()}"
    if any(p.name.rsplit(".", 1)[0] > mine for p in path.glob(f"{stem}*")):
        time.sleep(max(0.0, second + 1 - time.time()))


def _make_older(path: Path) -> None:
    """The clock may have been set back since files were made: they get names of the second before
    this one, in which they stand last and in their order."""
    second = int(time.time())
    before = f"{_STEM}{second - 1:010d}.~"
    later = sorted(p for p in path.glob(f"{_STEM}*") if p.name > f"{_STEM}{second + 1:010d}")
    for number, old in enumerate(later, len(list(path.glob(f"{before}*")))):
        rest = old.name.removeprefix(_STEM).split(".", 1)[1]
        old.rename(path / f"{before}{number:06d}.{rest}")
