"""Hook ``crash``: a report of the error that ended a run, and on request the weights."""

import json
import logging
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from phaseloop.engine import outcomes
from phaseloop.engine.data import failed
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.disk import replace
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.run_folder import replace_text
from phaseloop.engine.shards import local
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

FOLDER = "crash"
REPORT = "report.json"
WEIGHTS = "weights.pt"


@register_hook("crash", default=True)
class Crash(Hook):
    """Writes ``crash/update_000000017/report.json``: the error, where the run stood, which samples
    the batch at hand had, and which could not be read. The number is that of the updates made.

    Of several processes the one that failed writes it. Another crash there has a folder of its own,
    ``update_000000017.2``. Nothing is written where the user left by Ctrl-C, or where the
    configuration was wrong.

    Args:
        weights: write the model's parameters and buffers too, as they are after the error, in
            ``weights.pt``. It may be in the middle of an update, and is no checkpoint. With
            backend fsdp it is what this process holds of them, since others may be gone.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self, weights: bool = False) -> None:
        self.weights = weights

    def on_exception(self, task: Task, error: BaseException) -> None:
        if task.folder is None or isinstance(error, (KeyboardInterrupt, ConfigError)):
            return
        if outcomes.is_lost(error):
            return  # it follows from another process's error, which has a report
        if task.folder.lost:
            return  # another run may be where it was
        place = _new_folder(task.folder.path / FOLDER, f"update_{task.progress.updates:09d}")
        replace_text(place / REPORT, json.dumps(_report(task, error), indent=1) + "\n")
        log.info("what is known of the error is in %s", place)
        if self.weights:
            state = {name: local(value) for name, value in task.raw_state().items()}
            replace(place / WEIGHTS, lambda file: torch.save(state, file))


def _report(task: Task, error: BaseException) -> dict[str, Any]:
    progress, phase = task.progress, task.phase
    return {
        "error": type(error).__name__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": round(time.time(), 3),
        "rank": task.backend.rank,
        "phase": phase.name,
        "epoch": progress.epoch,
        "updates": progress.updates,
        "batch_of_phase": phase.position,
        "between_steps": task.failed_whole,
        "reading": failed.facts_of(error),
        "batches": [_samples(batch) for batch in task.batches_at_hand],
    }


def _samples(batch: Batch) -> dict[str, Any]:
    sources = batch.sources
    return {
        "indices": batch.indices.tolist(),
        "sources": None if sources is None else sources.tolist(),
        "weight": batch.weight,
    }


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(exist_ok=True)
    number, place = 1, parent / name
    while True:
        try:
            place.mkdir()  # there already: of an earlier crash, or of another process
            return place
        except FileExistsError:
            number += 1
            place = parent / f"{name}.{number}"
