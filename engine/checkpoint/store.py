"""The store: checkpoints as folders that are whole or do not exist.

A checkpoint is written to a temporary folder, every file flushed to disk, the manifest with sizes
and checksums last, and then renamed. Whatever is cut short at any instant leaves no folder with a
final name and no manifest that verifies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from phaseloop.engine.errors import CheckpointError, DamagedError

log = logging.getLogger("phaseloop")

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"update_(\d{9,})-(\d+)\Z")
_TEMPORARY = ".writing-"
_REMOVING = ".removing-"


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: its folder and what its manifest says."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def position(self) -> tuple[int, int]:
        """(updates, number of the save at that update): a later one compares greater."""
        return position(self.path.name)


def folder_name(updates: int, save: int) -> str:
    """Name of the ``save``-th checkpoint after ``updates`` updates."""
    return f"update_{updates:09d}-{save}"


def position(name: str) -> tuple[int, int]:
    """The reverse of :func:`folder_name`.

    Raises:
        CheckpointError: ``name`` is not a checkpoint's.
    """
    match = _NAME.match(name)
    if match is None:
        raise CheckpointError(f"{name!r} is not the name of a checkpoint (update_000000012-1)")
    return int(match[1]), int(match[2])


class Store:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> Saved:
        """Write a checkpoint; when this returns it is on disk, whole.

        Args:
            name: its folder, see :func:`folder_name`.
            parts: file name (``model.pt``) to content: tensors and plain Python.
            facts: what the manifest says beside sizes and checksums; plain JSON.

        Raises:
            CheckpointError: it could not be written; nothing is left under ``name``.
        """
        final, temporary = self.folder / name, self.folder / f"{_TEMPORARY}{name}"
        try:
            self._make_folder()
            _remove(temporary)
            temporary.mkdir()
            files = {file: _write_part(temporary / file, part) for file, part in parts.items()}
            manifest = seal({**facts, "format": FORMAT, "files": files})
            _write_bytes(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
            _flush_folder(temporary)
            os.rename(temporary, final)
            _flush_folder(self.folder)
        except (OSError, RuntimeError) as error:
            _remove(temporary)
            raise CheckpointError(f"checkpoint {final} could not be written: {error}") from error
        return Saved(final, manifest)

    def clean(self) -> None:
        """Remove what an interrupted write or removal left behind."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((_TEMPORARY, _REMOVING)):
                    _remove(path)

    def names(self) -> list[str]:
        """Names of all checkpoints, oldest first, damaged or not."""
        if not self.folder.is_dir():
            return []
        found = [p.name for p in self.folder.iterdir() if _NAME.match(p.name)]
        return sorted(found, key=position)

    def whole(self, set_aside: bool = True) -> Iterator[Saved]:
        """Checkpoints that verify, newest first.

        One that does not is named in the log and moved to ``set_aside/``, never deleted. A disk
        that cannot be read, or an unknown format, is no damage: that error is raised.

        Args:
            set_aside: False: leave a damaged one where it is.
        """
        for name in reversed(self.names()):
            try:
                yield verified(self.folder / name)
            except DamagedError as error:
                log.warning("%s", error)
                if set_aside:
                    self.set_aside(name)

    def set_aside(self, name: str) -> Path:
        """Move a checkpoint to ``set_aside/``, where nothing looks for one; its new place."""
        aside = self.folder / "set_aside"
        aside.mkdir(exist_ok=True)
        target, number = aside / name, 1
        while target.exists():
            number += 1
            target = aside / f"{name}.{number}"
        os.rename(self.folder / name, target)
        log.warning("checkpoint %s was moved to %s", name, target)
        return target

    def set_aside_before(self) -> list[str]:
        """Names of what lies in ``set_aside/``."""
        aside = self.folder / "set_aside"
        return sorted(path.name for path in aside.iterdir()) if aside.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove a checkpoint; cut short, it leaves nothing that passes for one."""
        doomed = self.folder / f"{_REMOVING}{name}"
        try:
            os.rename(self.folder / name, doomed)
        except FileNotFoundError:
            return
        _remove(doomed)

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            _flush_folder(self.folder.parent)


def verified(path: Path) -> Saved:
    """The checkpoint at ``path``, every byte of it checked against its manifest.

    Raises:
        DamagedError: it is incomplete or damaged.
        CheckpointError: it is absent, cannot be read, or is of a format unknown here.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise DamagedError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(manifest, dict) or manifest != seal(manifest):
        raise DamagedError(f"checkpoint {path} is damaged: {MANIFEST} was changed")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest['format']}, this program reads {FORMAT}"
        )
    for file, facts in manifest["files"].items():
        _verify_part(path / file, facts)
    return Saved(path, manifest)


def load(saved: Saved, file: str) -> Any:
    """One part of a verified checkpoint, on the CPU; nothing in it is executed.

    Raises:
        CheckpointError: it holds something else than tensors and plain Python.
    """
    return safe_load(saved.path / file)


def safe_load(path: Path) -> Any:
    """``torch.load`` of a file without running code from it.

    Raises:
        CheckpointError: the file is missing, unreadable, or would have to run code to be loaded.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{path} was not loaded: it is no file of tensors and plain Python "
            f"({type(error).__name__}: {reason[0]})"
        ) from error


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the checksum of its own content."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


class _HashingFile:
    """A file that keeps the checksum and size of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.hash.update(data)
        size = memoryview(data).nbytes
        self.size += size
        return size

    def flush(self) -> None:
        self._file.flush()


def _write_part(path: Path, part: Any) -> dict[str, Any]:
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        torch.save(part, hashing)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": hashing.size, "sha256": hashing.hash.hexdigest()}


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _verify_part(path: Path, facts: Mapping[str, Any]) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except FileNotFoundError as error:
        raise DamagedError(f"checkpoint {path.parent} lacks {path.name}") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if size != facts["bytes"]:
        raise DamagedError(
            f"checkpoint {path.parent} is damaged: {path.name} has {size} bytes, "
            f"not {facts['bytes']}"
        )
    if digest.hexdigest() != facts["sha256"]:
        raise DamagedError(
            f"checkpoint {path.parent} is damaged: {path.name} is not what was written"
        )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read now, whole or not: {error}")


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
