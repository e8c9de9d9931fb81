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

from phaseloop.engine.errors import PeerError

WRONG_CONFIG = 2
_FILE = "TORCHELASTIC_ERROR_FILE"
_STARTED_BY, _US = "PHASELOOP_STARTED_BY", "phaseloop"
_OURS = "phaseloop"

# What gloo, nccl and the store say when another process is gone, or does not come.
_LOST = re.compile(
    r"Connection (closed|reset) by peer|gloo/transport|Broken pipe|Timed out waiting|"
    r"Connection was likely closed|Failed to recv|failed to send|Socket Timeout|"
    r"remote process exited|wait timeout|not all ranks|"
    r"Watchdog caught collective operation timeout",
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
    """

    code: int
    head: str = ""
    text: str = ""
    lost: bool = False
    time: float = field(default_factory=time.time)


def say(error: BaseException, code: int, text: str) -> None:
    """Say that this process ends with an error: to its launcher, which says it once, or to all.

    Args:
        code: what the process will exit with.
        text: what one process alone prints of it.
    """
    head = f"{type(error).__name__}: {error}".strip()
    outcome = Outcome(code, head, text, is_lost(error))
    if leave(outcome) and os.environ.get(_STARTED_BY) == _US:
        return
    rank = os.environ.get("RANK")
    if rank is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        text = in_words(int(rank), outcome)
    print(text, file=sys.stderr, flush=True)


def in_words(rank: int, outcome: Outcome) -> str:
    """What is said of one process's error where there are several processes."""
    head, text = outcome.head, outcome.text.rstrip()
    if outcome.code == WRONG_CONFIG:
        return text
    if not text:
        return f"rank {rank} {head}"
    if outcome.lost or text == head:
        return f"rank {rank}: {head}"
    return f"rank {rank}: {head}\n{text}"


def leave(outcome: Outcome) -> bool:
    """Write it where the launcher looks; whether one does."""
    path = os.environ.get(_FILE)
    if not path:
        return False
    about = {"py_callstack": outcome.text, "timestamp": str(int(outcome.time))}
    message = {"message": outcome.head, "extraInfo": about}
    # Renamed into place: a process may be killed while it writes.
    unfinished = Path(f"{path}.part")
    unfinished.write_text(json.dumps({"message": message, _OURS: asdict(outcome)}))
    unfinished.replace(path)
    return True


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
