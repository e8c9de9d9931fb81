"""Event files: everything that TensorBoard's own reader finds in a run's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.plugins.hparams.api_pb2 import STATUS_UNKNOWN
from tensorboard.plugins.hparams.metadata import (
    PLUGIN_NAME,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    parse_session_end_info_plugin_data,
    parse_session_start_info_plugin_data,
)
from tensorboard.plugins.text.metadata import PLUGIN_NAME as TEXT
from tensorboard.util.tensor_util import make_ndarray

SPEED = "speed/samples_per_second"


def _read(reader: Any, folder: Path) -> Any:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every restart
    everything = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    found = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    return found


def plugins(folder: Path) -> Any:
    """What the plugins of TensorBoard's server get of the run in ``folder``."""
    return _read(plugin_event_accumulator, folder)


def everything(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Tag to (update, value), of every kind; without what is about the machine.

    Left out is what saves cost, of speeds the values, and hyper-parameters, which are a thing of
    their own: see :func:`hyper_parameters`.
    """
    board = _read(event_accumulator, folder)
    tags = board.Tags()
    found: dict[str, list[tuple[int, Any]]] = {}
    for tag in tags["scalars"]:
        if not tag.startswith("save/"):
            values = [(e.step, e.value) for e in board.Scalars(tag)]
            found[tag] = [(step, None) for step, _ in values] if tag == SPEED else values
    for tag in tags["images"]:
        found[tag] = [(e.step, e.encoded_image_string) for e in board.Images(tag)]
    for tag in tags["histograms"]:
        found[tag] = [(e.step, e.histogram_value) for e in board.Histograms(tag)]
    # The older reader, which knows what a histogram is, forgets no texts at a restart.
    board = plugins(folder)
    for tag, metadata in board.AllSummaryMetadata().items():
        if metadata.plugin_data.plugin_name == TEXT:
            values = [(e.step, make_ndarray(e.tensor_proto).item()) for e in board.Tensors(tag)]
            found[tag] = [(step, text.decode()) for step, text in values]
    return found


def hyper_parameters(folder: Path) -> tuple[dict[str, Any], int]:
    """By name, and the status of the one session; the session has to be there once."""
    content = plugins(folder).PluginTagToContent(PLUGIN_NAME)
    said = content.pop(SESSION_START_INFO_TAG)
    start = parse_session_start_info_plugin_data(said)
    end = content.pop(SESSION_END_INFO_TAG, None)
    assert not content
    values = {k: getattr(v, v.WhichOneof("kind")) for k, v in start.hparams.items()}
    assert start.start_time_secs > 0
    status = STATUS_UNKNOWN if end is None else parse_session_end_info_plugin_data(end).status
    return values, status
