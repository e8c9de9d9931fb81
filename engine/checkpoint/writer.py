"""Writer: one thread that brings one checkpoint at a time to disk, while the training goes on.

The thread is given a snapshot, which nobody changes, and calls nothing of the training. It holds no
lock of phaseloop's that a worker process, forked in the meantime, waits for: it logs nothing (the
main thread does, when it sees that the save is over). What the C library and OpenSSL lock inside is
made anew in a forked process; the lock of a module's import is not, so what writing to a folder
needs is imported before.

It is a daemon: a process that leaves by ``os._exit`` or a signal does not wait for it. What is then
cut short is no checkpoint, as after a kill.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseloop.engine.checkpoint.snapshot import Snapshot, compact
from phaseloop.engine.disk import flush
from phaseloop.engine.errors import CheckpointError

if TYPE_CHECKING:
    from phaseloop.engine.checkpoint.store import Saved, Store

_PATIENCE = 1.0
"""Seconds that a save which is given up gets to leave the file it is writing."""

_PATIENCE_AT_EXIT = 10.0
"""And once more before the interpreter ends, where the disk takes longer over one block."""


class _GivenUp(BaseException):
    """Raised in the thread by :meth:`Writer.give_up`."""


@dataclass
class Save:
    """One checkpoint on its way to disk.

    Attributes:
        store: where it goes.
        name: its name there.
        facts: what its manifest says beside sizes and checksums.
        files: flushed to disk before it is: what its state counts on.
        doomed: checkpoints that are removed once this one is on disk.
        then: called once it is on disk, before anything is removed.
        stalled: seconds that the training stood still for it.
        saved: the checkpoint; None: it is not on disk.
        error: what went wrong, also after it was on disk.
        seconds: from its beginning until it was on disk.
    """

    store: Store
    name: str
    facts: Mapping[str, Any]
    files: Sequence[Path] = ()
    doomed: Sequence[str] = ()
    then: Callable[[], None] | None = None
    stalled: float = 0.0
    saved: Saved | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    _given_up: bool = field(default=False, init=False)
    _saying: threading.Lock = field(default_factory=threading.Lock, init=False)

    def say(self) -> None:
        """Call ``then``, and remove what is doomed, unless it was given up."""
        with self._saying:
            if not self._given_up and self.then is not None:
                self.then()
        for name in self.doomed:
            if not self._given_up:
                self.store.remove(name)

    def give_up(self, patience: float) -> None:
        """From now on nothing is said; wait so many seconds for what is being said right now."""
        self._given_up = True
        if self._saying.acquire(timeout=patience):
            self._saying.release()

    @property
    def bytes(self) -> int:
        """Size of its files, without the manifest's own; 0 while it is not on disk."""
        files = {} if self.saved is None else self.saved.manifest["files"]
        return sum(facts["bytes"] for facts in files.values())

    def check(self) -> None:
        """Raises CheckpointError where something went wrong."""
        if self.error is not None:
            raise self.error


class Writer:
    """Writes checkpoints, one at a time.

    Attributes:
        over: the save in flight has come to its end, and :meth:`wait` has not yet told anyone.
        stalled: seconds that the training stood still for all saves of this process.
    """

    def __init__(self) -> None:
        self.over = False
        self.stalled = 0.0
        self._thread: threading.Thread | None = None
        self._flight: Save | None = None
        self._snapshot = Snapshot()

    def begin(
        self,
        save: Save,
        parts: Mapping[str, Any],
        own: Collection[int] = (),
        *,
        copies: bool = True,
    ) -> None:
        """Copy the state, and write the copy in the thread.

        The host stands still while it copies. There is one copy of the state in memory, kept for
        the next save. Whoever calls has waited for the save before.

        Args:
            own: ``id`` of the tensors in it that are copies already.
            copies: False: write the state as it is, which nobody may change until it is over.
        """
        assert self._flight is None
        copied = self._snapshot.take(parts, own) if copies else compact(parts)
        self._flight, self.over = save, False
        self._thread = threading.Thread(
            target=self._run, args=(save, copied), name="phaseloop-writer", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread to give
            self._thread = self._flight = None
            raise _failure(save, error) from error
        self.count(save, save.begun)

    def write(self, save: Save, parts: Mapping[str, Any]) -> None:
        """The same in this thread, without a copy: when this returns the save is over."""
        assert self._flight is None
        _bring_to_disk(save, compact(parts))
        self.count(save, save.begun)
        self._flight, self.over = save, True

    def count(self, save: Save, since: float) -> None:
        """The training stands still for this save, since so long on ``time.perf_counter``."""
        seconds = time.perf_counter() - since
        save.stalled += seconds
        self.stalled += seconds

    def ended(self, seconds: float) -> bool:
        """Wait so long for the save in flight; whether it is over, or there is none."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Save | None:
        """The save in flight, once it is over; None: there is none, or it was told already.

        It may have an error, see :meth:`Save.check`.
        """
        if self._thread is not None:
            self._thread.join()
        save, self._thread, self._flight, self.over = self._flight, None, None, False
        return save

    def settle(self) -> Save | None:
        """Wait until nothing is in flight; what came of it is still to be told by :meth:`wait`."""
        if self._thread is not None:
            self._thread.join()
        return self._flight

    def give_up(self) -> None:
        """Leave at once: a save in flight is cut short, as by a kill, and is no checkpoint."""
        thread, save = self._thread, self._flight
        self._thread, self._flight, self.over = None, None, False
        if save is not None:
            save.give_up(_PATIENCE)
        if thread is not None and thread.is_alive():
            # The interpreter must not end around a thread that is inside a library in C++.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_GivenUp)
            )
            thread.join(_PATIENCE)
            if thread.is_alive():
                atexit.register(thread.join, _PATIENCE_AT_EXIT)

    def _run(self, save: Save, parts: Mapping[str, Any]) -> None:
        try:
            _bring_to_disk(save, parts)
        except _GivenUp:
            return
        except BaseException as error:  # asyncio's CancelledError, of a file system's package
            save.error = _failure(save, error)
        self.over = True


def flush_all(files: Sequence[Path]) -> None:
    """Flush files to disk; what is not there any more cannot be counted on anyway."""
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            flush(path)


def _bring_to_disk(save: Save, parts: Mapping[str, Any]) -> None:
    """Write it; then say so; then remove what is not needed any more. Errors go into ``save``."""
    try:
        flush_all(save.files)
        save.saved = save.store.write(save.name, parts, save.facts)
        save.seconds = time.perf_counter() - save.begun
        save.say()
    except CheckpointError as error:
        save.error = error
    except Exception as error:
        save.error = _failure(save, error)


def _failure(save: Save, error: BaseException) -> CheckpointError:
    when = "could not be written" if save.saved is None else "is whole, but what follows failed"
    failure = CheckpointError(f"checkpoint {save.name} {when}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
