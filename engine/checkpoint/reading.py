"""Reading a checkpoint: nothing of it is used before every byte was compared with its manifest.

Older formats stay readable: the manifest's frame (format, phaseloop, files, sha256) is the same in
all of them, and a table has the reader of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from phaseloop.engine.checkpoint.local import Local
from phaseloop.engine.checkpoint.names import MANIFEST, is_name, position
from phaseloop.engine.checkpoint.remote import Remote
from phaseloop.engine.errors import CheckpointError, DamagedError
from phaseloop.engine.urls import Place, Url, place

FORMAT = 1
BLOCK = 1 << 20
"""Bytes that are read, written and hashed at a time."""


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: where it lies and what its manifest says.

    Attributes:
        path: its folder or URL.
        manifest: see the page about the format.
        kept: of one that was fetched: its files as they were verified.
    """

    path: Place
    manifest: Mapping[str, Any]
    kept: Mapping[str, IO[bytes]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def position(self) -> tuple[int, int]:
        """(updates, number of the save at that update): a later one compares greater."""
        return position(self.path.name)


def verified(path: Place | str) -> Saved:
    """The checkpoint at ``path``, every byte of it checked against its manifest.

    Of a URL each file is fetched once, to a temporary file: what is verified is what is loaded.

    Raises:
        DamagedError: it is incomplete or damaged.
        CheckpointError: it is absent, cannot be read, or is of a format unknown here.
    """
    where = place(path) if isinstance(path, str) else path
    return verify(storage_at(where.parent), where.name)


def manifest_of(path: Place) -> dict[str, Any]:
    """The manifest of a checkpoint that another process has verified.

    Raises:
        CheckpointError: it is absent, cannot be read, or is of a format unknown here.
    """
    return _manifest(storage_at(path.parent), path.name)


def load(saved: Saved, file: str) -> Any:
    """One part of a verified checkpoint, on the CPU; nothing in it is executed.

    Raises:
        CheckpointError: it holds something else than tensors and plain Python.
    """
    return _READERS[saved.manifest["format"]](saved, file)


def safe_load(path: Place) -> Any:
    """``torch.load`` of a file without running code from it.

    Raises:
        CheckpointError: the file is missing, unreadable, or would have to run code to be loaded.
    """
    if isinstance(path, Path):
        return _load(path, path)
    with tempfile.TemporaryFile() as kept:
        try:
            with storage_at(path.parent).open("", path.name) as source:
                checksum(source, kept)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read: {said(error)}") from error
        kept.seek(0)
        return _load(kept, path)


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the checksum of its own content."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def storage_at(folder: Place) -> Local | Remote:
    """What keeps checkpoints there."""
    return Remote(folder) if isinstance(folder, Url) else Local(folder)


def version() -> str:
    """Of phaseloop: it is written into every manifest."""
    import phaseloop

    return phaseloop.__version__


def unreadable(path: Place, error: BaseException) -> CheckpointError:
    """Of what may be whole, though it cannot be read now."""
    return CheckpointError(f"{path} cannot be read now, whole or not: {said(error)}")


def said(error: BaseException) -> str:
    """What an error says; its kind where it says nothing."""
    return str(error) or type(error).__name__


def verify(storage: Local | Remote, name: str) -> Saved:
    """:func:`verified`, of a checkpoint by its name."""
    path = storage.folder / name
    kept: dict[str, IO[bytes]] = {}
    try:
        manifest = _manifest(storage, name)
        files: Mapping[str, Mapping[str, Any]] = manifest["files"]
        there = storage.files(name)
        extra = [file for file in there if file not in files and file != MANIFEST]
        # Hidden files are file systems' and browsers' own, such as .nfs0000 and .DS_Store.
        if foreign := [file for file in extra if not file.startswith(".")]:
            raise DamagedError(f"checkpoint {path} is damaged: {foreign[0]} is no part of it")
        for file, facts in files.items():
            if file not in there:
                raise DamagedError(f"checkpoint {path} lacks {file}")
            if storage.keeps_what_it_read:
                kept[file] = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as Saved
            with storage.open(name, file) as source:
                _compare(path, file, facts, checksum(source, kept.get(file)))
    except (OSError, RuntimeError) as error:
        raise unreadable(path, error) from error
    return Saved(path, manifest, kept)


def _manifest(storage: Local | Remote, name: str) -> dict[str, Any]:
    path = storage.folder / name
    try:
        there = storage.files(name)
    except FileNotFoundError as error:
        if isinstance(path, Path) and path.is_symlink():
            raise DamagedError(
                f"checkpoint {path} is a link to {os.readlink(path)}, which is not there"
            ) from error
        raise CheckpointError(f"there is no checkpoint at {path}") from error
    except NotADirectoryError as error:
        raise DamagedError(f"checkpoint {path} is damaged: it is a file") from error
    if MANIFEST not in there:
        raise DamagedError(f"checkpoint {path} has no {MANIFEST}")
    try:
        with storage.open(name, MANIFEST) as opened:
            text = opened.read()
        manifest = json.loads(text)
    except (FileNotFoundError, ValueError) as error:
        raise DamagedError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or manifest != seal(manifest):
        raise DamagedError(f"checkpoint {path} is damaged: {MANIFEST} was changed")
    if manifest.get("format") not in _READERS:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest.get('format')}, written by phaseloop "
            f"{manifest.get('phaseloop', 'of an unknown version')}; this is phaseloop {version()}, "
            f"which reads formats up to {FORMAT}"
        )
    if is_name(name) and manifest.get("name", name) != name:
        raise DamagedError(
            f"checkpoint {path} is damaged: its {MANIFEST} is that of {manifest['name']}"
        )
    return manifest


def checksum(source: IO[bytes], kept: IO[bytes] | None = None) -> tuple[int, str]:
    """Bytes and checksum of an open file, which is copied to ``kept``."""
    digest, size = hashlib.sha256(), 0
    while block := source.read(BLOCK):
        digest.update(block)
        size += len(block)
        if kept is not None:
            kept.write(block)
    return size, digest.hexdigest()


def _compare(path: Place, file: str, facts: Mapping[str, Any], found: tuple[int, str]) -> None:
    size, digest = found
    if size != facts["bytes"]:
        raise DamagedError(
            f"checkpoint {path} is damaged: {file} has {size} bytes, not {facts['bytes']}"
        )
    if digest != facts["sha256"]:
        raise DamagedError(f"checkpoint {path} is damaged: {file} is not what was written")


def _read_1(saved: Saved, file: str) -> Any:
    """Format 1: each part is a file of ``torch.save``."""
    if file not in saved.kept:
        return _load(saved.path / file, saved.path / file)
    saved.kept[file].seek(0)
    return _load(saved.kept[file], saved.path / file)


_READERS: dict[int, Callable[[Saved, str], Any]] = {1: _read_1}
"""How a part is read, by the format of its checkpoint: an older one stays readable."""


def _load(source: Any, shown: Place) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{shown} was not loaded: it is no file of tensors and plain Python "
            f"({why_refused(error) or type(error).__name__})"
        ) from error


def why_refused(error: Exception) -> str:
    """What a file asks for beside tensors and plain Python; empty: it is a damaged one.

    torch's own text says how to run what is in it.
    """
    match = re.search(r"\bGLOBAL ([\w.]+)", str(error))
    return f"it asks for {match[1]}" if match else ""
