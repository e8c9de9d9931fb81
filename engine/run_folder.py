"""The run folder: one folder a run owns, with its status, log and lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from phaseloop.engine import replica
from phaseloop.engine.disk import make_folder, replace
from phaseloop.engine.errors import ConfigError, InUseError
from phaseloop.engine.log_file import LogFile
from phaseloop.engine.settings import Run
from phaseloop.engine.urls import Place, known_options, place

log = logging.getLogger("phaseloop")

STATUS = "status.json"
RESOLVED = "resolved.yaml"
LOG = "log.txt"
METRICS = "metrics.jsonl"
LOCK = ".lock"
RANKS = "ranks"
COMMAND = "PHASELOOP_COMMAND"
"""A word of its own for each command that starts processes: it is in the status of its run."""

ONLY_FILE = {"only_file": True}


class RunFolder:
    """Paths, status and lock of a run's folder.

    Args:
        path: the folder; made by :meth:`open`.
        checkpoints: where the run's checkpoints lie, if not in it: another folder, or a URL.
        options: of the URL's file system.
    """

    def __init__(
        self,
        path: Path,
        checkpoints: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path.absolute()
        self._checkpoints = None if checkpoints is None else place(checkpoints, options)
        self._key, self._verb = "run.dir", "training in"
        self._lock: IO[bytes] | None = None
        self._beside: RunFolder | None = None
        self._handler: logging.Handler | None = None
        self._seen: tuple[int, int] | None = None

    @classmethod
    def of(cls, run: Run) -> RunFolder:
        """The folder that the settings name."""
        return cls(Path(run.dir or "."), run.checkpoints, run.storage_options)

    @classmethod
    def found(cls, path: Path) -> RunFolder:
        """The folder of a past run, which says itself where its checkpoints lie.

        Passwords were not written down: they have to come from the environment.
        """
        folder = cls(path)
        run = folder.config().get("run") or {}
        return cls(path, run.get("checkpoints"), known_options(run.get("storage_options") or {}))

    @property
    def elsewhere(self) -> bool:
        """The checkpoints are not in this folder, but where ``run.checkpoints`` says."""
        return self._checkpoints is not None

    @property
    def checkpoints(self) -> Place:
        """Folder or URL of the run's checkpoints."""
        if self._checkpoints is None:
            return self.path / "checkpoints"
        if isinstance(self._checkpoints, Path):
            return self._checkpoints.absolute()
        return self._checkpoints

    def open(self) -> None:
        """Make the folder and take its lock; a dead process holds none.

        The folder of checkpoints, in it or elsewhere, has a lock of its own: another run's folder
        may name it, too. Where it is a link to nothing, nobody saves, and there is none to take.

        Raises:
            ConfigError: the path is a file, or cannot be made or written.
            InUseError: another process trains in this folder, or saves to that one.
        """
        self._open()
        checkpoints = self._locked_checkpoints()
        if checkpoints is not None and (self.elsewhere or checkpoints._leads_somewhere()):
            try:
                checkpoints._open()
            except BaseException:
                self.close()
                raise

    def _locked_checkpoints(self) -> RunFolder | None:
        """The folder of checkpoints, as one to be locked; None: behind a URL there is no lock."""
        where = self.checkpoints
        if self._beside is None and isinstance(where, Path) and where != self.path:
            self._beside = RunFolder(where)
            self._beside._verb = "saving to"
            self._beside._key = "run.checkpoints" if self.elsewhere else "run.dir"
        return self._beside

    def _leads_somewhere(self) -> bool:
        return not self.path.is_symlink() or self.path.exists()

    def _open(self) -> None:
        try:
            # Whoever had the folder may have put it aside since it was opened here.
            while not self.in_place:
                self.close()
                self._take()
        except OSError as error:
            self.close()
            raise ConfigError(self._key, self._problem(error)) from None

    def _problem(self, error: OSError) -> str:
        """Why the folder cannot be used."""
        if not self._leads_somewhere():
            return f"{self.path} is a link to {os.readlink(self.path)}, which is not there"
        if self.path.is_file():
            return f"{self.path} is a file, and shall be a folder"
        return f"{self.path} cannot be used: {error.strerror}"

    def check_checkpoints(self) -> None:
        """Raises ConfigError where the folder of checkpoints in this one is a link to nothing."""
        checkpoints = self._locked_checkpoints()
        if checkpoints is not None and not checkpoints._leads_somewhere():
            raise ConfigError(checkpoints._key, checkpoints._problem(OSError()))

    def renew_checkpoints(self) -> bool:
        """Make the folder of checkpoints anew where it was removed or moved meanwhile; whether so.

        Where the folder above it is gone too, a disk may be: that is left to whoever saves.

        Raises:
            ConfigError: it cannot be made.
            InUseError: another process saves there now.
        """
        checkpoints = self._beside
        if checkpoints is None or checkpoints._lock is None or checkpoints.in_place:
            return False
        if not checkpoints.path.parent.is_dir():
            return False
        checkpoints._open()
        return True

    def _take(self) -> None:
        """Lock the file that is there now, and write down who has it."""
        make_folder(self.path)
        self._lock = lock = open(self.path / LOCK, "ab+", buffering=0)  # noqa: SIM115 held on
        try:
            # lockf and not flock: loader workers, forked later, must not hold it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip()
            self.close()
            raise InUseError(
                f"another process ({holder or 'unknown'}) is {self._verb} {self.path}; "
                f"wait for it, or use another {self._key}"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())

    @property
    def in_place(self) -> bool:
        """The folder that was opened still stands where it was."""
        if self._lock is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return False

    @property
    def lost(self) -> str:
        """``moved`` or ``removed`` since it was opened; empty: neither, or it is not open.

        On a process that has not opened it, since it began to log.
        """
        if self._lock is None:
            return "" if self._seen in (None, _identity(self.path)) else "moved"
        if self.in_place:
            return ""
        return "moved" if os.fstat(self._lock.fileno()).st_nlink else "removed"

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._beside is not None:
            self._beside.close()

    def status(self) -> dict[str, Any]:
        """What ``status.json`` says; empty when there is none that can be read."""
        try:
            found = json.loads((self.path / STATUS).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace ``status.json`` at once, so that no reader sees half of it."""
        by = {"command": os.environ[COMMAND]} if COMMAND in os.environ else {}
        text = json.dumps({**status, **by, "time": round(time.time(), 3)}, indent=1)
        replace_text(self.path / STATUS, text + "\n")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``resolved.yaml`` by the configuration in use."""
        replace_text(self.path / RESOLVED, yaml.safe_dump(dict(config), sort_keys=False))

    def config(self) -> dict[str, Any]:
        """What ``resolved.yaml`` says; empty when there is none that can be read."""
        try:
            found = yaml.safe_load((self.path / RESOLVED).read_text())
        except (OSError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def start_log(self, rank: int = 0) -> None:
        """Send everything that phaseloop logs to ``log.txt`` too.

        Of several processes the others say what goes wrong in ``ranks/log-RANK.txt``, which is
        made when there is something to say. What all say alike is not in it.

        Raises:
            ConfigError: it cannot be opened.
        """
        path = self.path / LOG if rank == 0 else self.path / RANKS / f"log-{rank}.txt"
        try:
            if rank == 0:
                self._handler = LogFile(path)
            else:
                self._seen = _identity(self.path)
                self._handler = LogFile(path, delay=True, lost=lambda: self.lost)
                self._handler.setLevel(logging.WARNING)
                self._handler.addFilter(lambda record: not hasattr(record, "alike"))
        except OSError as error:
            raise ConfigError(self._key, f"{path} cannot be written: {error.strerror}") from None
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(replica.keep_to_mine(self._handler))

    def stop_log(self) -> None:
        """Close ``log.txt``."""
        if self._handler is not None:
            log.removeHandler(self._handler)
            with contextlib.suppress(OSError):  # what could not be written was told
                self._handler.close()
            self._handler = None


def _identity(path: Path) -> tuple[int, int] | None:
    """What stays the same of a folder that is moved; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def put_aside(path: Path) -> Path:
    """Rename an old run's folder to ``NAME.old-1`` (or the next free number); its new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(target)
    return target


# The thread that writes checkpoints renews the status too, and two that wrote into one temporary
# file would leave a mixture. No worker process waits for this lock: none writes such a file.
_one_at_a_time = threading.Lock()


def replace_text(path: Path, text: str) -> None:
    """Write a small text file by renaming: a reader sees the old one or the new one."""
    with _one_at_a_time:
        replace(path, lambda file: file.write(text.encode()))
