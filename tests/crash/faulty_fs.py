"""A file system that fails, is full, sleeps or kills at the n-th operation below one folder.

Every way from Python to the disk is replaced: ``open`` (and what the file that it gives reads and
writes), and the functions of ``os``; so also what pathlib, shutil, torch.save, fsspec and logging
do. Not seen is what a library in C does by itself. Loaded by a user's module (``imports``), it does
what the environment variable ``FAULTY_FS`` says.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "FAULTY_FS"

WRITING = ("create", "write", "truncate", "fsync", "rename", "mkdir", "unlink", "rmdir")
"""The kinds of operations that change the disk; beside them: ``open``, ``read``, ``list``."""

ACTIONS = ("count", "error", "short", "full", "kill", "kill_half", "kill_after", "sleep")


@dataclass
class Plan:
    """What goes wrong, and when.

    Attributes:
        root: the folder below which operations count; the folder itself too.
        do: ``count``: nothing; ``error``: the operation fails; ``short``: a write takes half of the
            bytes and says so; ``full``: it and every writing operation after it fails for want
            of space, a write after half of its bytes; ``kill``, ``kill_after``: this process is
            killed before, after it; ``kill_half``: after half of the bytes of a write, before
            any other; ``sleep``: it takes ``seconds``.
        at: number of the operation, from 1; 0 with ``sleep``: every one.
        number: the error's ``errno``.
        seconds: see ``sleep``.
        kinds: only these count; empty: all.
        log: a file, not below ``root``, that gets a line for each operation: its kind and path.
    """

    root: str
    do: str = "count"
    at: int = 0
    number: int = errno.EIO
    seconds: float = 0.0
    kinds: tuple[str, ...] = ()
    log: str = ""

    def environment(self) -> dict[str, str]:
        """What a process is told it by."""
        return {VARIABLE: json.dumps(asdict(self))}


def install_as_told() -> None:
    """Do what the environment variable says, in this process; nothing without it."""
    told = os.environ.pop(VARIABLE, "")
    if told:
        Layer(Plan(**json.loads(told))).install()


class Layer:
    """The replaced functions.

    Args:
        plan: what they do.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.do in ACTIONS, plan.do
        self.plan = plan
        self.count = 0
        self._root = os.path.abspath(plan.root)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._os_open, self._os_write = os.open, os.write
        self._full = False
        self._log = -1
        if plan.log:
            self._log = os.open(plan.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def install(self) -> None:
        """Replace them."""
        for module in (builtins, io):
            module.open = self._opened(open)
        os.open = self._os_opened(os.open)
        os.write = self._written(os.write)
        for name, kind in (("fsync", "fsync"), ("fdatasync", "fsync"), ("ftruncate", "truncate"),
                           ("truncate", "truncate"), ("mkdir", "mkdir"), ("rmdir", "rmdir"),
                           ("unlink", "unlink"), ("remove", "unlink"), ("listdir", "list"),
                           ("scandir", "list")):  # fmt: skip
            setattr(os, name, self._plain(getattr(os, name), kind))
        for name in ("rename", "replace", "link"):
            setattr(os, name, self._renamed(getattr(os, name)))

    # --- one operation ---

    def before(self, kind: str, path: Any) -> str:
        """Count an operation, and do to it what comes first.

        Returns:
            ``""``: go on; ``half``: of a write, half of the bytes; ``kill_half``: and then die;
            ``after``: die when it is done.
        """
        plan = self.plan
        if os.getpid() != self._process or (plan.kinds and kind not in plan.kinds):
            return ""
        with self._lock:
            self.count += 1
            now = self.count == plan.at
            if self._log >= 0:
                self._os_write(self._log, f"{kind} {path}\n".encode())
        if plan.do == "sleep":
            if now or plan.at == 0:
                time.sleep(plan.seconds)
            return ""
        if self._full and kind in WRITING and kind not in ("unlink", "rmdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if not now or plan.do == "count":
            return ""
        return self._act(kind, path)

    def _act(self, kind: str, path: Any) -> str:
        do, writes = self.plan.do, kind == "write"
        if do == "kill" or (do == "kill_half" and not writes):
            die()
        if do == "kill_half":
            return "kill_half"
        if do == "kill_after":
            return "after"
        if do == "full":
            self._full = True
            if writes:
                return "half"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if do == "short":
            return "half" if writes else ""
        number = self.plan.number
        raise OSError(number, os.strerror(number), str(path))

    def below(self, path: Any, folder: int | None = None) -> str:
        """The whole path, if it is in the folder; else nothing."""
        try:
            if isinstance(path, int):
                whole = os.readlink(f"/proc/self/fd/{path}")
            else:
                whole = os.fsdecode(path)
                if folder is not None and not os.path.isabs(whole):
                    whole = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), whole)
                whole = os.path.abspath(whole)
        except (OSError, TypeError):
            return ""
        return whole if whole == self._root or whole.startswith(f"{self._root}/") else ""

    # --- the replaced functions ---

    def _plain(self, original: Any, kind: str) -> Callable[..., Any]:
        def function(path: Any = ".", *args: Any, **options: Any) -> Any:
            whole = self.below(path, options.get("dir_fd"))
            then = self.before(kind, whole) if whole else ""
            result = original(path, *args, **options)
            if then == "after":
                die()
            return result

        return function

    def _renamed(self, original: Any) -> Callable[..., Any]:
        def function(old: Any, new: Any, **options: Any) -> Any:
            whole = self.below(new, options.get("dst_dir_fd")) or self.below(
                old, options.get("src_dir_fd")
            )
            then = self.before("rename", whole) if whole else ""
            original(old, new, **options)
            if then == "after":
                die()

        return function

    def _os_opened(self, original: Any) -> Callable[..., Any]:
        def function(path: Any, flags: int, *args: Any, **options: Any) -> Any:
            whole = self.below(path, options.get("dir_fd"))
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            then = self.before("create" if writes else "open", whole) if whole else ""
            result = original(path, flags, *args, **options)
            if then == "after":
                die()
            return result

        return function

    def _written(self, original: Any) -> Callable[..., Any]:
        def function(file: int, data: Any) -> int:
            whole = self.below(file)
            then = self.before("write", whole) if whole else ""
            return _write(then, data, lambda part: original(file, part))

        return function

    def _opened(self, original: Any) -> Callable[..., Any]:
        def function(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None,
            errors: Any = None, newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            whole = "" if isinstance(file, int) else self.below(file)
            if not whole:
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            writes = bool(set(mode) & set("wax+"))
            then = self.before("create" if writes else "open", whole)
            raw = _File(self, whole, file, mode.replace("b", "").replace("t", ""), opener)
            if then == "after":
                die()
            return _dressed(raw, mode, buffering, encoding, errors, newline)

        return function


class _File(io.FileIO):
    """The bottom of every file that ``open`` gives."""

    def __init__(self, layer: Layer, whole: str, file: Any, mode: str, opener: Any) -> None:
        super().__init__(file, mode, opener=opener)
        self._layer = layer
        self._whole = whole

    def write(self, data: Any) -> Any:
        then = self._layer.before("write", self._whole)
        return _write(then, data, super().write)

    def readinto(self, buffer: Any) -> Any:
        then = self._layer.before("read", self._whole)
        return _then(super().readinto(buffer), then)

    def readall(self) -> Any:
        then = self._layer.before("read", self._whole)
        return _then(super().readall(), then)

    def truncate(self, size: Any = None) -> Any:
        then = self._layer.before("truncate", self._whole)
        return _then(super().truncate(size), then)


def _dressed(
    raw: io.FileIO, mode: str, buffering: int, encoding: Any, errors: Any, newline: Any
) -> Any:
    """Buffered, and as text, as ``open`` does it."""
    if buffering == 0:
        return raw
    size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
    file: Any
    if "+" in mode:
        file = io.BufferedRandom(raw, size)
    elif "r" in mode:
        file = io.BufferedReader(raw, size)
    else:
        file = io.BufferedWriter(raw, size)
    if "b" not in mode:
        file = io.TextIOWrapper(file, encoding, errors, newline, line_buffering=buffering == 1)
        file.mode = mode
    return file


def _write(then: str, data: Any, write: Callable[[Any], int]) -> int:
    view = memoryview(data).cast("B")
    if then in ("half", "kill_half"):
        count = write(view[: max(1, len(view) // 2)])
        if then == "kill_half":
            die()
        return count
    return int(_then(write(data), then))


def _then(result: Any, then: str) -> Any:
    if then == "after":
        die()
    return result


def die() -> None:
    """The end of this process, at once."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may take a moment
