"""A scenario: a training that is broken off again and again, and has to come out all the same."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from phaseloop.engine.checkpoint import store
from tests.crash import command, features
from tests.crash.command import Command
from tests.crash.faulty_fs import Plan
from tests.crash.features import config
from tests.rigs import equal, r1

KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
SAVED = (128 + TERM, 128 + INT, 128 + HUP)
"""Exit codes of a run that a signal stopped and that is saved."""

_START = {1: 0.15, 2: 0.7}
_STARTING = 20
"""Seconds, by processes, and operations from a command line's start to its first update, about."""

CALLS = 250_000
"""About the number of calls and returns, Python's and C's, of one command line."""

# How one command line ends, and what else there is to say of it; beside these an instant, ``at``,
# as a part of the undisturbed run.
ENDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "kill": {},
    "kill in slow saves": {"seconds": (0.002, 0.005)},
    "kill at a call": {},
    "kill at an operation": {"do": ("kill", "kill_half", "kill_after")},
    "SIGTERM": {},
    "SIGTERM in slow saves": {"seconds": (0.002, 0.005)},
    "Ctrl-C": {},
    "Ctrl-C twice": {"pause": (0.0, 0.02, 0.2)},
    "SIGHUP": {},
    "error": {"number": (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EDQUOT)},
    "short write": {},
    "disk full": {},
}

# Half of them kills, in saves above all.
_OFTEN = ("kill", "kill in slow saves", "kill at a call", *("kill at an operation",) * 5)

_ANYWHERE = ("kill", "kill at a call", "SIGTERM", "Ctrl-C", "Ctrl-C twice", "SIGHUP")
"""Ends that come to any of several processes, or to all; the primary alone writes to the disk."""

_SIGNALS = {"kill": KILL, "SIGTERM": TERM, "Ctrl-C": INT, "SIGHUP": HUP}
_FAULTS = {"error": "error", "short write": "short", "disk full": "full"}


def scenarios(most: int, processes: int = 1) -> st.SearchStrategy[dict[str, Any]]:
    """A training on so many processes and up to ``most`` ends of it.

    By a generator that hypothesis gives: of single choices it likes to make the same again, and
    its scenarios would be alike.
    """
    return st.randoms(use_true_random=True).map(lambda random: drawn(random, most, processes))


def drawn(random: Random, most: int, processes: int = 1) -> dict[str, Any]:
    """The same, by this generator."""
    ends = [_drawn_end(random, processes) for _ in range(random.randint(1, most))]
    made = {"features": features.drawn(random, processes), "ends": ends}
    return made if processes == 1 else {**made, "processes": processes}


def _drawn_end(random: Random, processes: int) -> dict[str, Any]:
    way = random.choice((*ENDS, *_OFTEN))
    more = {name: random.choice(values) for name, values in ENDS[way].items()}
    end = {"way": way, "at": round(random.random(), 3), **more}
    if processes > 1 and way in _ANYWHERE:
        everywhere = () if way == "kill at a call" else (None,)
        end["rank"] = random.choice((*everywhere, *range(processes)))
    return end


@dataclass
class Result:
    """What came of a scenario.

    Attributes:
        ends: number of broken-off command lines by their way.
        kills: of these, killed by SIGKILL.
        inside: kills that left a checkpoint half written or half removed.
        wrong: everything that is not as promised.
    """

    ends: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    inside: int = 0
    wrong: list[str] = field(default_factory=list)


def play(folder: Path, scenario: dict[str, Any], true: bool = False) -> Result:
    """Break a training off as the scenario says, go on each time, and compare in the end.

    Args:
        folder: an empty one.
        true: every command line is a process of its own from the beginning.
    """
    processes = scenario.get("processes", 1)
    whole = Undisturbed(folder / "whole", scenario["features"], processes)
    rough = command.lay_out(folder / "rough", config(scenario["features"], processes=processes))
    for file in whole.folder.glob("composed-*"):
        shutil.copy(file, rough)
    result = Result()
    done = False
    for end in scenario["ends"]:
        done = _broken_off(rough, whole, _possible(end, scenario["features"]), result, true)
        if done or result.wrong:
            break
    if not done and not result.wrong:
        code, output = command.run(rough, true=true, processes=whole.processes)
        if code != 0:
            result.wrong.append(f"the last command line ended with {code}:\n{output}")
    if not result.wrong:
        result.wrong += equal.differences(whole.folder / "run", rough / "run")
        result.wrong += _pictures_differ(whole.folder / "run", rough / "run")
    return result


class Undisturbed:
    """The run that nobody disturbs.

    Attributes:
        processes: of each command line.
        seconds: how long it took.
        updates: it made.
        operations: on the file system.
    """

    def __init__(self, folder: Path, given: dict[str, Any], processes: int = 1) -> None:
        self.folder = command.lay_out(folder, config(given, processes=processes))
        self.processes = processes
        log = folder / "operations"
        faults = Plan(str(folder / "run"), log=str(log))
        code, output = command.run(self.folder, faults=faults, processes=processes)
        assert code == 0, f"the undisturbed run ended with {code}:\n{output}"
        status = json.loads((folder / "run" / "status.json").read_text())
        self.seconds, self.updates = float(status["seconds"]), int(status["updates"])
        self.operations = len(log.read_text().splitlines())

    def left(self, run: Path) -> float:
        """The part of it that a run in another folder has still to do."""
        names = store.Store(run / "checkpoints").names()
        done = store.position(names[-1])[0] if names else 0
        return max(0.0, 1 - done / self.updates)


def _possible(end: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A run that rolls back goes back to the newest checkpoint, so none may come in between."""
    way = end["way"]
    if given.get("roll_back") and way.startswith(("SIG", "Ctrl-C")):
        return {**end, "way": "kill in slow saves" if "slow" in way else "kill"}
    return end


def _broken_off(
    folder: Path, whole: Undisturbed, end: dict[str, Any], result: Result, true: bool
) -> bool:
    """One command line; whether it came to its end all the same."""
    way: str = end["way"]
    at = end["at"] * whole.left(folder / "run")
    operation = 1 + int(end["at"] * _STARTING + at * whole.operations)
    run = str(folder / "run")
    faults, calls, seconds = None, 0, whole.seconds
    if "slow" in way:
        faults = Plan(run, do="sleep", seconds=end["seconds"])
        seconds += whole.operations * end["seconds"]
    elif way in _FAULTS:
        faults = Plan(run, do=_FAULTS[way], at=operation, number=end.get("number", errno.EIO))
    elif way == "kill at an operation":
        faults = Plan(run, do=end["do"], at=operation)
    elif way == "kill at a call":
        calls = 1 + int(at * CALLS)
    several = {"processes": whole.processes, "rank": end.get("rank") or 0}
    started = Command(folder, faults=faults, calls=0 if true else calls, true=true, **several)
    if (number := _SIGNALS.get(way.split(" in ")[0].removesuffix(" twice"))) is not None:
        start = _START[whole.processes]
        time.sleep(end["at"] * start + at * seconds + (2.5 * whole.processes if true else 0))
        started.send(number, end.get("rank"))
        if "twice" in way:
            time.sleep(end["pause"])
            started.send(number, end.get("rank"))
    pid = started.pid
    ends = started.ends()
    code, output = _of_all(ends, end.get("rank", 0))
    if code != 0:
        result.ends[way] += 1
        result.kills += code == -KILL
        result.inside += code == -KILL and left_over(folder / "run")
    told = f"after {json.dumps(end)}, which ended with {code}"
    if true and whole.processes > 1 and way.startswith("kill") and code == 1:
        code = -KILL  # of one of them, which the launcher tells in its own way
    found = [*wrong_code(way, code, output), *wrong_folder(folder / "run")]
    saved = all(one in SAVED for one, _ in ends)
    if saved and "twice" not in way:  # which may have left at once, unsaved
        found += _not_saved(folder, pid)
    if code == 0 and any(others := [one for one, _ in ends]):
        found.append(f"it has ended well, and others have not: {others}")
    result.wrong += [f"{told}: {what}" for what in found]
    return code == 0


def _of_all(ends: list[tuple[int, str]], rank: int | None) -> tuple[int, str]:
    """How a command line ended that may be several processes: as the one did that was disturbed.

    Where all were, one that the signal ended; what the others met with then follows from that.
    """
    if rank is None:
        return next((end for end in ends if end[0] < 0 or end[0] in SAVED), ends[0])
    return ends[rank if rank < len(ends) else 0]


# --- what has to hold whenever a process is gone ---


def wrong_code(way: str, code: int, output: str) -> Iterator[str]:
    """An exit code that does not belong to this way of ending, or an error that is not told."""
    if code == 0:
        return
    allowed: tuple[int, ...]
    if way.startswith("kill"):
        allowed = (-KILL,)
    elif way in _FAULTS:
        allowed = (1, 2)
        if "rror" not in output and "wrong configuration" not in output:
            yield f"no error is told:\n{output}"
    else:  # before the run has taken the signals over, they do what they always do
        number = _SIGNALS[way.split(" in ")[0].removesuffix(" twice")]
        allowed = (128 + number, -number)
        if number == INT and (not output or "KeyboardInterrupt" in output):
            allowed = (*allowed, 1)
    if code not in allowed:
        yield f"{code} is not one of {allowed}:\n{output}"


def wrong_folder(run: Path) -> Iterator[str]:
    """Whatever in a run's folder is not whole, or not true."""
    checkpoints = store.Store(run / "checkpoints")
    names = checkpoints.names()
    for name in names:
        try:
            store.verified(checkpoints.folder / name)
        except Exception as error:
            yield f"{name} is not whole: {error}"
    if (run / "status.json").exists():
        try:
            json.loads((run / "status.json").read_text())
        except ValueError as error:
            yield f"status.json is not whole: {error}"
    log = (run / "log.txt").read_text(errors="replace") if (run / "log.txt").exists() else ""
    saved = re.findall(r"saved (update_\d+-\d+)", log)
    # A later one may be there, not logged yet, in whose place it was removed.
    last = max(saved, key=store.position, default="")
    if last and (not names or store.position(names[-1]) < store.position(last)):
        yield f"{last} is logged as saved, and there are {names}"
    if (run / "checkpoints" / "set_aside").exists():
        yield f"something was set aside: {list((run / 'checkpoints' / 'set_aside').iterdir())}"


def left_over(run: Path) -> bool:
    """A checkpoint was being written or removed."""
    folder = run / "checkpoints"
    return folder.is_dir() and any(
        path.name.startswith((".writing-", ".removing-")) for path in folder.iterdir()
    )


def _not_saved(folder: Path, pid: int) -> Iterator[str]:
    """An update that a process had finished when a signal stopped it, and that is not saved."""
    probe = equal.probe_of(folder / "run")
    lines = r1.lines(probe, "update") if probe.exists() else []
    made = max((line["update"] for line in lines if line["process"] == pid), default=0)
    names = store.Store(folder / "run" / "checkpoints").names()
    saved = store.position(names[-1])[0] if names else 0
    if made > saved:
        yield f"update {made} was finished, and the newest checkpoint is {saved}"


def _pictures_differ(reference: Path, run: Path) -> Iterator[str]:
    """What TensorBoard shows."""
    if (reference / "tensorboard").is_dir():
        yield from equal.differ("tensorboard", _scalars(reference), _scalars(run))


def _scalars(run: Path) -> dict[str, list[Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every restart
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {
        tag: [[event.step, event.value] for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(("save/", "speed/"))  # what it cost to save, and how fast it went
    }
