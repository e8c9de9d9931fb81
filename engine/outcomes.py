"""Outcomes: what a process of several leaves behind when it ends, for whoever started it.

It is the error file of torch's elastic agents (``torch.distributed.elastic.multiprocessing.errors``
says how it looks), so that torchrun shows it too, with a part of ours. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from phaseloop.engine import replica
from phaseloop.engine.errors import PeerError

WRONG_CONFIG = 2
SIGNALLED = 128
_FILE = "TORCHELASTIC_ERROR_FILE"
_STARTED_BY, _US = "PHASELOOP_STARTED_BY", "phaseloop"
_OURS = "phaseloop"

# What gloo, nccl, Horovod and the store say when another process is gone, or does not come.
_LOST = re.compile(
    r"Connection (closed|reset) by peer|gloo/transport|Broken pipe|Timed out waiting|"
    r"Connection was likely closed|Failed to recv|failed to send|Socket Timeout|"
    r"remote process exited|wait timeout|not all ranks|"
    r"Watchdog caught collective operation timeout|Horovod has been shut down",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
        code: what the command line exits with.
        head: type and text of the error, in a line.
        text: what is printed of it.
        lost: it followed from another process's end.
        time: when, in seconds since 1970.
        who: whose end it was, where that is not the process's rank.
    """

    code: int
    head: str = ""
    text: str = ""
    lost: bool = False
    time: float = field(default_factory=time.time)
    who: str = ""


def say(error: BaseException, code: int, text: str) -> None:
    """Say that this process ends with an error: to its launcher, which says it once, or to all.

    Args:
        code: what the process will exit with.
        text: what one process alone prints of it.
    """
    head = f"{type(error).__name__}: {error}".strip()
    mine = replica.mine()
    who = "" if mine is None else f"rank {mine.rank}"
    outcome = Outcome(code, head, text, is_lost(error), who=who)
    if leave(outcome) and os.environ.get(_STARTED_BY) == _US:
        return
    rank = os.environ.get("RANK")
    if outcome.who or (rank is not None and os.environ.get("WORLD_SIZE", "1") != "1"):
        text = in_words(int(rank or 0), outcome)
    print(text, file=sys.stderr, flush=True)


def in_words(rank: int, outcome: Outcome) -> str:
    """What is said of one process's error where there are several processes."""
    head, text = outcome.head, outcome.text.rstrip()
    who = outcome.who or f"rank {rank}"
    if outcome.code == WRONG_CONFIG:
        return text
    if not text:
        return f"{who} {head}"
    if outcome.lost or text == head:
        return f"{who}: {head}"
    return f"{who}: {head}\n{text}"


def precedence(outcome: Outcome) -> tuple[bool, bool, float]:
    """To find, as the smallest, what happened first, but for what only followed from it."""
    return outcome.lost, outcome.code > SIGNALLED, outcome.time


def leave(outcome: Outcome) -> bool:
    """Write it where the launcher looks; whether one does."""
    path = _path()
    if not path:
        return False
    about = {"py_callstack": outcome.text, "timestamp": str(int(outcome.time))}
    message = {"message": outcome.head, "extraInfo": about}
    # Renamed into place: a process may be killed while it writes.
    unfinished = Path(f"{path}.part")
    unfinished.write_text(json.dumps({"message": message, _OURS: asdict(outcome)}))
    unfinished.replace(path)
    return True


def _path() -> str:
    """Where this process leaves it, or this thread of several; empty: nobody looks."""
    path, mine = os.environ.get(_FILE, ""), replica.mine()
    return path if mine is None or not path else of_replica(path, mine.rank)


def has_left() -> bool:
    """This process, or this thread of several, has left one."""
    return left(_path()) is not None


def of_replica(path: str, rank: int) -> str:
    """Where a thread leaves it, each of several that are the ranks of one process."""
    return f"{path}.{rank}"


def by_replica(world_size: int) -> list[Outcome | None]:
    """What the threads of this process left, by rank."""
    path = os.environ.get(_FILE, "")
    return [left(of_replica(path, rank)) for rank in range(world_size)]


def left(path: str) -> Outcome | None:
    """What a process left in its error file; None: nothing."""
    try:
        found = json.loads(Path(path).read_text())
        return Outcome(**found[_OURS])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_lost(error: BaseException) -> bool:
    """The error says only that another process is gone: what happened, happened there."""
    return any(_says_lost(each) for each in _chain(error))


def _says_lost(error: BaseException) -> bool:
    if isinstance(error, PeerError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__.startswith("torch")}
    if "DistError" in names:  # of torch.distributed: the network, the store, nccl
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it was raised from, once each: one may be raised from itself."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
