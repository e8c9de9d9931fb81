"""The store: checkpoints that are whole or do not exist, whatever cuts a write or a removal short.

How that is done depends on where they lie: see :mod:`local` and :mod:`remote`. What is the same
everywhere is here: each part is written once, with its checksum taken on the way; the manifest
with all sizes and checksums comes last; every byte is compared with it before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch

# What torch.save would import when it is first called: in the writer's thread, while a worker may
# be forked, which then could wait for the lock of that import.
import torch.utils.serialization.config

from phaseloop.engine.checkpoint.names import MANIFEST as MANIFEST
from phaseloop.engine.checkpoint.names import folder_name as folder_name
from phaseloop.engine.checkpoint.names import is_name
from phaseloop.engine.checkpoint.names import position as position
from phaseloop.engine.checkpoint.reading import BLOCK, said, storage_at, unreadable, verify, version
from phaseloop.engine.checkpoint.reading import FORMAT as FORMAT
from phaseloop.engine.checkpoint.reading import Saved as Saved
from phaseloop.engine.checkpoint.reading import load as load
from phaseloop.engine.checkpoint.reading import manifest_of as manifest_of
from phaseloop.engine.checkpoint.reading import safe_load as safe_load
from phaseloop.engine.checkpoint.reading import seal as seal
from phaseloop.engine.checkpoint.reading import verified as verified
from phaseloop.engine.errors import CheckpointError, ConfigError, DamagedError
from phaseloop.engine.urls import Place, place

log = logging.getLogger("phaseloop")

_ASIDE = "set_aside"
_OLD = "old"


class Store:
    """The checkpoints of one run.

    One thread may write while another asks for names.

    Args:
        folder: a folder or a URL; made when the first checkpoint is written.
    """

    def __init__(self, folder: Place | str) -> None:
        self.folder: Place = place(folder) if isinstance(folder, str) else folder
        self._storage = storage_at(self.folder)

    def reach(self, key: str) -> None:
        """Find out whether checkpoints can be written there, before anything else is done.

        Raises:
            ConfigError: they cannot; ``key`` says where.
        """
        try:
            self._storage.reach()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                key, f"{self.folder} cannot be reached and written: {said(error)}"
            ) from None

    def take(self, owner: str) -> None:
        """Write here from now on, and remove what an interrupted write or removal left behind.

        Args:
            owner: this process in words, for another that writes here, too.
        """
        try:
            self._storage.take(owner)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder} cannot be written: {said(error)}") from error
        self.clean()

    def clean(self) -> None:
        """Remove what an interrupted write or removal left behind."""
        try:
            self._storage.clean()
        except (OSError, RuntimeError) as error:
            raise unreadable(self.folder, error) from error

    def exists(self) -> bool:
        """There is a folder of checkpoints, if only an empty one."""
        try:
            return self._storage.exists()
        except (OSError, RuntimeError) as error:
            raise unreadable(self.folder, error) from error

    def write(self, name: str, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> Saved:
        """Write a checkpoint; when this returns it is whole, and safe from a loss of power.

        Args:
            name: its folder, see :func:`folder_name`.
            parts: file name (``model.pt``) to content: tensors and plain Python.
            facts: what the manifest says beside sizes and checksums; plain JSON.

        Raises:
            CheckpointError: it could not be written; nothing is left under ``name``.
        """
        storage, begun = self._storage, False
        try:
            storage.begin(name)
            begun = True
            files = {}
            for file, part in parts.items():
                with storage.create(name, file) as opened:
                    files[file] = _write_part(opened, part)
            frame = {"name": name, "format": FORMAT, "phaseloop": version(), "files": files}
            manifest = seal({**facts, **frame})
            sizes = {file: facts["bytes"] for file, facts in files.items()}
            storage.finish(name, json.dumps(manifest, indent=1).encode(), sizes)
        except BaseException as error:
            if begun:
                storage.abandon(name)
            if isinstance(error, OSError | RuntimeError):
                raise CheckpointError(
                    f"checkpoint {self.folder / name} could not be written: {said(error)}"
                ) from error
            raise
        return Saved(self.folder / name, manifest)

    def names(self) -> list[str]:
        """Names of all checkpoints, oldest first, damaged or not.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        try:
            found = [name for name in self._storage.entries() if is_name(name)]
        except (OSError, RuntimeError) as error:
            raise unreadable(self.folder, error) from error
        return sorted(found, key=position)

    def whole(self, set_aside: bool = True) -> Iterator[Saved]:
        """Checkpoints that verify, newest first.

        One that does not is named in the log and moved to ``set_aside/``, never deleted. A disk
        that cannot be read, or an unknown format, is no damage: that error is raised.

        Args:
            set_aside: False: leave a damaged one where it is.

        Raises:
            CheckpointError: a checkpoint cannot be read, or a damaged one not be set aside.
        """
        for name in reversed(self.names()):
            try:
                yield verify(self._storage, name)
            except DamagedError as error:
                log.warning("%s", error)
                if set_aside:
                    self._set_aside_damaged(name, error)

    def set_aside(self, name: str) -> Place:
        """Move a checkpoint to ``set_aside/``, where nothing looks for one; its new place.

        Raises:
            CheckpointError: it could not be moved.
        """
        try:
            target = self._free(f"{_ASIDE}/{name}", ".")
            self._storage.move(name, target)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint {self.folder / name} could not be moved to {_ASIDE}/: {said(error)}"
            ) from error
        moved = self._below(target)
        log.warning("checkpoint %s was moved to %s", name, moved)
        return moved

    def set_aside_before(self) -> list[str]:
        """Names of what lies in ``set_aside/``."""
        try:
            return self._storage.aside(_ASIDE)
        except (OSError, RuntimeError) as error:
            raise unreadable(self.folder / _ASIDE, error) from error

    def put_old_aside(self) -> Place:
        """Move all checkpoints, the oldest first, to ``old-1/`` (or the next free number).

        Cut short, the newest are still where they were.
        """
        try:
            target = self._free(_OLD, "-", always=True)
            for name in [*self.names(), _ASIDE]:
                if self._storage.beside(name):
                    self._storage.move(name, f"{target}/{name}")
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoints in {self.folder} could not be put aside: {said(error)}"
            ) from error
        return self._below(target)

    def remove(self, name: str) -> None:
        """Remove a checkpoint; cut short, it leaves nothing that passes for one.

        Raises:
            CheckpointError: it could not be removed.
        """
        try:
            self._storage.remove(name)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint {self.folder / name} could not be removed: {said(error)}"
            ) from error

    def _set_aside_damaged(self, name: str, damage: DamagedError) -> None:
        try:
            self.set_aside(name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{damage}; and {error}. Make the folder writable, or move it away by hand"
            ) from error

    def _free(self, name: str, sign: str, always: bool = False) -> str:
        """The first name that nothing has: ``a``, ``a.2``, ``a.3``; ``a-1``, ``a-2``."""
        number = 1
        target = f"{name}{sign}{number}" if always else name
        while self._storage.beside(target):
            number += 1
            target = f"{name}{sign}{number}"
        return target

    def _below(self, target: str) -> Place:
        found = self.folder
        for part in target.split("/"):
            found = found / part
        return found


# --- writing ---


class _HashingFile:
    """A file that keeps the checksum and size of what is written to it.

    Attributes:
        error: the first error of the file, which torch may hide behind one of its own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._remember():
            for start in range(0, len(view), BLOCK):  # a block is hashed while the cache has it
                block = view[start : start + BLOCK]
                self._file.write(block)
                self.hash.update(block)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        with self._remember():
            self._file.flush()

    @contextlib.contextmanager
    def _remember(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


def _write_part(file: IO[bytes], part: Any) -> dict[str, Any]:
    hashing = _HashingFile(file)
    try:
        torch.save(part, hashing)  # type: ignore[arg-type]
    except RuntimeError:
        if hashing.error is None:
            raise
    if hashing.error is not None:
        raise hashing.error
    return {"bytes": hashing.size, "sha256": hashing.hash.hexdigest()}
