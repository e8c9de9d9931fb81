"""Rank state: what every process has of its own, in a checkpoint and back.

Each sends some twenty kilobytes to the primary, which alone writes. It sends them as bytes, and so
they are kept: the primary looks into none of a thousand, and a process that goes on unpacks its own
alone. On the same number of processes each takes its own back, to the bit. On another number the
first takes all that add up (meters, rows not yet written), and the others begin with nothing.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from phaseloop.engine.checkpoint.loader_state import own_loaders
from phaseloop.engine.checkpoint.on_host import fetched
from phaseloop.engine.checkpoint.snapshot import compact
from phaseloop.engine.data.transfer import to_device
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.phases import TRAIN

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_ALONE = ("meters", "recorder", "carry", "asked_end", "stop_asked")
"""What stands in a checkpoint as the primary has it, beside ``rng`` and ``loader``, which are lists
of one; what the other processes have is in ``others``."""


def gathered(task: Task) -> dict[str, Any]:
    """The part of a checkpoint that differs from process to process; a collective.

    On the primary that of all; elsewhere only its own.
    """
    own = {
        # At a test's end too: the training goes on from where the test began.
        "rng": task.random_before_test
        or {"host": task.host_state(), "device": task.backend.rng_state()},
        "meters": {name: meters.state_dict() for name, meters in task.meter_sets.items()},
        "recorder": task.recorder.state_dict(),
        "carry": task.carry,
        "asked_end": task.asked_end.get(TRAIN, ""),
        "stop_asked": task.stop_asked,
        "loader": own_loaders(task),
    }
    task.stop_saved = bool(task.stop_asked)
    state = {
        "rng": [own["rng"]],
        "loader": [own["loader"]] if own["loader"] else [],
        **{name: own[name] for name in _ALONE},
    }
    if task.agreement is not None:
        small = {**own, "meters": _of_open_epoch(task, own["meters"])}
        ranks = task.backend.gather_object(b"" if task.primary else _packed(task, small))
        if task.primary:
            state["others"] = _joined(ranks[1:])
    return state


def _of_open_epoch(task: Task, meters: dict[str, Any]) -> dict[str, Any]:
    """Those of the epoch at hand, which goes on where they are.

    What an epoch that is over, or a test, has measured was read, and may be as large as all its
    samples; and a test that is not over is run again from its start.
    """
    return {TRAIN: meters[TRAIN]} if task.progress.epoch_open else {}


def count(state: dict[str, Any]) -> int:
    """How many processes made the checkpoint."""
    return 1 + len(state["others"]["sizes"]) if "others" in state else 1


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """What one of them had of its own: ``rng``, ``loader``, meters, rows and ``carry``."""
    if rank == 0:
        loader: dict[str, Any] = next(iter(state.get("loader", [])), {})
        # Of a checkpoint from before these were saved, nobody had asked for an end.
        alone = {
            "asked_end": "",
            "stop_asked": "",
            **{name: state[name] for name in _ALONE if name in state},
        }
        return {"rng": state["rng"][0], "loader": loader, **alone}
    sizes = state["others"]["sizes"]
    stop = sum(itertools.islice(sizes, rank))
    packed = state["others"]["bytes"][stop - sizes[rank - 1] : stop]
    own: dict[str, Any] = torch.load(
        io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True
    )
    return own


def own_loader_states(task: Task, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every process that there was, by rank: empty but for this one's."""
    states: list[dict[str, Any]] = [{} for _ in range(count(state))]
    if task.backend.rank < len(states):
        states[task.backend.rank] = of_rank(state, task.backend.rank)["loader"]
    return states


def take(task: Task, state: dict[str, Any]) -> None:
    """Meters, rows not yet written, and ``carry``, from a checkpoint's state."""
    if count(state) == task.backend.world_size:
        _take(task, of_rank(state, task.backend.rank))
    else:
        _take_merged(task, state)


def _take(task: Task, own: dict[str, Any]) -> None:
    for name, meters in task.meter_sets.items():
        if name in own["meters"]:
            meters.load_state_dict(to_device(own["meters"][name], task.device))
    task.recorder.load_state_dict(_where_they_are_added(task, own["recorder"]))
    task.carry = to_device(own["carry"], task.device)
    task.asked_end = {TRAIN: own["asked_end"]} if own["asked_end"] else {}
    _take_stop(task, own.get("stop_asked", ""))


def _where_they_are_added(task: Task, rows: Any) -> Any:
    """What was recorded, on the device; of a lazy one, on the host."""
    return rows if task.backend.lazy else to_device(rows, task.device)


def _take_stop(task: Task, reason: str) -> None:
    """The run was killed after a stop was asked for, and before the border: it stops there."""
    if not reason or task.test_only:
        return
    task.stop_asked, task.stop_saved = reason, True
    progress = task.progress
    tested = progress.tests_due or progress.tested_at == progress.updates
    if not progress.epoch_open or tested:  # else when the epoch is entered: it may be at its end
        task.stop_reason = task.stop_reason or reason


def _take_merged(task: Task, state: dict[str, Any]) -> None:
    """On another number of processes: everything that adds up goes to the first."""
    first = task.primary
    ranks = [of_rank(state, rank) for rank in range(count(state) if first else 1)]
    for meters in task.meter_sets.values():
        meters.reset()
    # What an epoch that is over has measured was read, and a test is run again from its start.
    if first and task.progress.epoch_open:
        states = [rank["meters"][TRAIN] for rank in ranks]
        task.meter_sets[TRAIN].load_merged(to_device(states, task.device))
    rows = [rank["recorder"] for rank in ranks]
    task.recorder.load_merged(_where_they_are_added(task, rows), first)
    asked = [rank["asked_end"] for rank in ranks if rank["asked_end"]]
    task.asked_end = {}
    if asked and task.agreement is not None:
        task.asked_end = {TRAIN: asked[0]}
    elif asked:
        task.progress.ending = task.progress.ending or asked[0]
    stops = [rank["stop_asked"] for rank in ranks if rank.get("stop_asked")]
    _take_stop(task, next(iter(stops), ""))
    task.carry = None
    if any(rank["carry"] is not None for rank in ranks):
        log.warning(
            "task.carry is what each of %d processes had of its own; this is another number, so "
            "it begins empty",
            count(state),
            extra=ALIKE,
        )


def _packed(task: Task, own: dict[str, Any]) -> bytes:
    """As bytes that :func:`torch.load` takes."""
    file = io.BytesIO()
    torch.save(compact(fetched(own, task.backend)), file)
    return file.getvalue()


def _joined(ranks: Sequence[bytes]) -> dict[str, Any]:
    """One tensor of all bytes, uint8, and how many of them are each process's."""
    joined = torch.frombuffer(bytearray(b"".join(ranks)), dtype=torch.uint8)
    return {"bytes": joined, "sizes": [len(packed) for packed in ranks]}
