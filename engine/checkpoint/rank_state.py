"""Rank state: what every process has of its own, in a checkpoint and back.

Each gathers some ten kilobytes to the primary, which alone writes. On the same number of processes
each takes its own back, to the bit. On another number the first takes all that add up (meters, rows
not yet written), and the others begin with nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from phaseloop.engine import rng
from phaseloop.engine.checkpoint.loader_state import own_loaders
from phaseloop.engine.data.transfer import to_device
from phaseloop.engine.phases import TRAIN

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_ALONE = ("meters", "recorder", "carry", "asked_end")
"""What stands in a checkpoint as the primary has it; the other processes' is in ``others``."""


def gathered(task: Task) -> dict[str, Any]:
    """The part of a checkpoint that differs from process to process.

    On the primary that of all; elsewhere only its own, with None in the place of the others'.
    """
    own = {
        "rng": {"host": rng.host_state(), "device": task.backend.rng_state()},
        "meters": {name: meters.state_dict() for name, meters in task.meter_sets.items()},
        "recorder": task.recorder.state_dict(),
        "carry": task.carry,
        "asked_end": task.asked_end.get(TRAIN, ""),
        "loader": own_loaders(task),
    }
    if task.agreement is None:
        ranks = [own]
    else:
        ranks = task.backend.gather_object(to_device(own, torch.device("cpu")))
    first, rest = ranks[0] or own, ranks[1:]
    state = {
        "rng": [rank and rank["rng"] for rank in ranks],
        "loader": [rank and rank["loader"] for rank in ranks] if own["loader"] else [],
        **{name: first[name] for name in _ALONE},
    }
    if rest:
        state["others"] = [rank and {name: rank[name] for name in _ALONE} for rank in rest]
    return state


def take(task: Task, state: dict[str, Any]) -> None:
    """Meters, rows not yet written, and ``carry``, from a checkpoint's state."""
    # Of a checkpoint from before there were several processes, nobody had asked for an end.
    first = {"asked_end": "", **{name: state[name] for name in _ALONE if name in state}}
    ranks = [first, *state.get("others", [])]
    if len(ranks) == task.backend.world_size:
        _take(task, ranks[task.backend.rank])
    else:
        _take_merged(task, ranks)


def _take(task: Task, own: dict[str, Any]) -> None:
    for name, meters in task.meter_sets.items():
        if name in own["meters"]:
            meters.load_state_dict(to_device(own["meters"][name], task.device))
    task.recorder.load_state_dict(to_device(own["recorder"], task.device))
    task.carry = to_device(own["carry"], task.device)
    task.asked_end = {TRAIN: own["asked_end"]} if own["asked_end"] else {}


def _take_merged(task: Task, ranks: list[dict[str, Any]]) -> None:
    """On another number of processes: everything that adds up goes to the first."""
    first = task.backend.primary
    for meters in task.meter_sets.values():
        meters.reset()
    # What an epoch that is over has measured was read, and a test is run again from its start.
    if first and task.progress.epoch_open:
        states = [rank["meters"][TRAIN] for rank in ranks]
        task.meter_sets[TRAIN].load_merged(to_device(states, task.device))
    rows = [rank["recorder"] for rank in ranks]
    task.recorder.load_merged(to_device(rows, task.device), first)
    asked = [rank["asked_end"] for rank in ranks if rank["asked_end"]]
    task.asked_end = {TRAIN: asked[0]} if asked else {}
    task.carry = None
    if any(rank["carry"] is not None for rank in ranks):
        log.warning(
            "task.carry is what each of %d processes had of its own; this is another number, so "
            "it begins empty",
            len(ranks),
        )
