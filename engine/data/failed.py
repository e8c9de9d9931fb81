"""Reading that failed: which samples were asked for, said with the error, also by a worker."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

_NAME = "phaseloop_reading"


def note(error: BaseException, what: str, **facts: Any) -> None:
    """Keep with an error what was being read; what was noted first, stays.

    Args:
        error: it is changed.
        what: in words, for the log: ``sample 17 of data.train``.
        facts: for a report; plain JSON.
    """
    if facts_of(error) is not None:
        return
    with contextlib.suppress(Exception):  # a class of the user's may forbid it
        setattr(error, _NAME, {"what": what, **facts})
    add = getattr(error, "add_note", None)  # from Python 3.11 on
    if add is not None:
        add(f"while reading {what}")


def facts_of(error: BaseException) -> dict[str, Any] | None:
    """What was kept with an error, or with the one that it came from."""
    found: dict[str, Any] | None = getattr(error, _NAME, None)
    if found is None and error.__cause__ not in (None, error):
        return facts_of(error.__cause__)
    return found


def said(error: BaseException) -> str:
    """``while reading sample 17 of data.train``; empty: nothing was being read."""
    facts = facts_of(error)
    return "" if facts is None else f"while reading {facts['what']}"


def hand_on(error: Exception) -> _Failed:
    """Raise it; in a worker, return what raises it in the process that asked."""
    worker = get_worker_info()
    if worker is None:
        raise error
    return _Failed(error, f"in DataLoader worker process {worker.id}")


class _Failed(ExceptionWrapper):
    """torch sends an error's text to the process that asked, and drops what it carries."""

    def __init__(self, error: Exception, where: str) -> None:
        found = (type(error), error, error.__traceback__)
        super().__init__(found, where)  # type: ignore[no-untyped-call]
        self.facts = facts_of(error)

    def reraise(self) -> NoReturn:
        try:
            super().reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            with contextlib.suppress(Exception):
                setattr(error, _NAME, self.facts)  # its text has the note
            raise
        raise AssertionError("it always raises")
