"""Event files: what TensorBoard reads of a run, beside what torch's writer puts into them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseloop.engine.disk import replace

if TYPE_CHECKING:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard import SummaryWriter

STEM = "events.out.tfevents."

# A file of its own, read before all others, since it can be replaced: of what HParams reads there
# is one of a kind in a run, and of two the first stands.
_SESSION = f"{STEM}{0:010d}.hparams"
_SESSION_END = "hparams-end"


def drop_from(writer: SummaryWriter, update: int) -> None:
    """Tell readers to forget everything from ``update`` on, as ``purge_step`` does."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    writer._get_file_writer().add_event(Event(session_log=start), step=update)


def wait_for_a_later_name(path: Path) -> None:
    """Readers take event files in the order of their names: second, host, process. Where another
    file was made in this very second and its name sorts after ours, wait for the next second."""
    second = int(time.time())
    stem = f"{STEM}{second:010d}."
    mine = f"{stem}{socket.gethostname()}.{os.getpid()}"
    if any(p.name.rsplit(".", 1)[0] > mine for p in path.glob(f"{stem}*")):
        time.sleep(max(0.0, second + 1 - time.time()))


def make_older(path: Path) -> None:
    """The clock may have been set back since files were made: they get names of the second before
    this one, in which they stand last and in their order."""
    second = int(time.time())
    before = f"{STEM}{second - 1:010d}.~"
    later = sorted(p for p in path.glob(f"{STEM}*") if p.name > f"{STEM}{second + 1:010d}")
    for number, old in enumerate(later, len(list(path.glob(f"{before}*")))):
        rest = old.name.removeprefix(STEM).split(".", 1)[1]
        old.rename(path / f"{before}{number:06d}.{rest}")


def add_text(writer: SummaryWriter, tag: str, text: str, update: int) -> None:
    """Markdown, under this very tag; torch's own method puts something behind it."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    value = Summary.Value(
        tag=tag,
        metadata=metadata.create_summary_metadata(display_name="", description=""),
        tensor=make_tensor_proto(text.encode(), dtype="string", shape=[]),
    )
    writer._get_file_writer().add_summary(Summary(value=[value]), update)


def begin_session(folder: Path, parameters: Mapping[str, Any], started: float) -> None:
    """Say by which values a run is listed among hyper-parameters; it has not ended.

    Args:
        folder: of the run's event files.
        parameters: by name; text, numbers, booleans. With none the run is not listed.
        started: when the run began, seconds since 1970.
    """
    from google.protobuf.struct_pb2 import Value
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    for old in [*folder.glob(f"{STEM}*.{_SESSION_END}"), folder / _SESSION]:
        old.unlink(missing_ok=True)
    if not parameters:
        return
    info = SessionStartInfo(start_time_secs=started)
    for name, value in parameters.items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        info.hparams[name].CopyFrom(Value(**{kind: value}))
    found = HParamsPluginData(session_start_info=info)
    _write(folder / _SESSION, SESSION_START_INFO_TAG, found, started)


def end_session(folder: Path, succeeded: bool) -> None:
    """The run has ended by itself, for good or with an error."""
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    if not (folder / _SESSION).exists():
        return
    now = time.time()
    status = Status.Value("STATUS_SUCCESS" if succeeded else "STATUS_FAILURE")
    found = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=now))
    # The newest of all names: a TensorBoard that is reading looks at later ones only.
    path = folder / f"{STEM}{int(now):010d}.{_SESSION_END}"
    _write(path, SESSION_END_INFO_TAG, found, now)


def _write(path: Path, tag: str, found: HParamsPluginData, seconds: float) -> None:
    """A whole event file with what HParams reads under this tag."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    said = metadata.create_summary_metadata(found)
    value = Summary.Value(tag=tag, metadata=said, tensor=metadata.NULL_TENSOR)
    events = [
        Event(wall_time=seconds, file_version="brain.Event:2"),
        Event(wall_time=seconds, step=0, summary=Summary(value=[value])),
    ]

    def write(file: Any) -> None:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())

    replace(path, write)
