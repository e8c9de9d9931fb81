"""Event files: everything that TensorBoard's own reader finds in a run's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HPARAMS = "_hparams_/"
SPEED = "speed/samples_per_second"


def accumulator(folder: Path) -> EventAccumulator:
    """What the run in ``folder`` has, all of it."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every restart
    everything = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    return found


def everything(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Tag to (update, value), of every kind; without what is about the machine.

    Left out is what saves cost; of speeds the values; and of hyper-parameters, which say when they
    were written, what they are about: see :func:`session`.
    """
    board = accumulator(folder)
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
    for tag in tags["tensors"]:
        if not tag.startswith(HPARAMS):
            found[tag] = [
                (e.step, e.tensor_proto.string_val[0].decode()) for e in board.Tensors(tag)
            ]
    return found
