"""Features on disk: what a model made of every sample of a set, in files that are data alone.

A folder holds the set's parts, files of safetensors with the tensors ``features``, ``targets`` and
``indices``, and ``features.json``, which names them, with their numbers of samples and checksums.
It is written under another name and renamed once it is whole. What it takes the place of is set
aside for that instant: wherever a process is killed, one of both can be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine import disk
from phaseloop.engine.errors import DataError

MANIFEST = "features.json"
UNFINISHED = ".unfinished"
"""Ending of a folder's name while it is written."""

_FORMAT = 1


@dataclass(frozen=True)
class Features:
    """What lies in a folder, in the order of the dataset.

    Attributes:
        features: [N, ...].
        targets: [N, ...]; None where the set has none.
        indices: int64 [N], the dataset's index of each sample, rising.
        about: what ``features.json`` says: the set, the run, the weights.
    """

    features: Tensor
    targets: Tensor | None
    indices: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)


def load_features(folder: str | Path) -> Features:
    """Read what the step ``extract`` has written of one set.

    Args:
        folder: the set's, which holds ``features.json``.

    Raises:
        DataError: it is not there or not whole: a part is missing, too many or too few bytes, or
            has changed.
    """
    folder = Path(folder)
    if not folder.exists() and (_set_aside(folder) / MANIFEST).is_file():
        folder = _set_aside(folder)  # a process was killed in finish(), between its two names
    about = manifest(folder)
    parts: list[Mapping[str, Tensor]] = []
    for part in about["parts"]:
        parts.append(_read(folder / part["file"], part["sha256"]))
    tensors = {name: torch.cat([part[name] for part in parts]) for name in about["tensors"]}
    order = tensors["indices"].argsort(stable=True)
    tensors = {name: tensor[order] for name, tensor in tensors.items()}
    return Features(tensors["features"], tensors.get("targets"), tensors["indices"], about)


def manifest(folder: Path) -> dict[str, Any]:
    """What a folder of features says of itself.

    Raises:
        DataError: it is none, is of a later format, or names a file outside itself.
    """
    path = folder / MANIFEST
    try:
        about = json.loads(path.read_text())
    except FileNotFoundError:
        there = sorted(inner.parent.name for inner in folder.glob(f"*/{MANIFEST}"))
        inside = f"; there are sets in it: {', '.join(there)}" if there else ""
        raise DataError(
            f"{folder} holds no {MANIFEST}, as the step extract writes it{inside}"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise DataError(f"{path} is not of format {_FORMAT}, the one that is read here")
    for part in about["parts"]:
        if Path(part["file"]).name != part["file"]:
            raise DataError(f"{path} names a file that is not in its folder: {part['file']!r}")
    return about


def _read(path: Path, sha256: str) -> Mapping[str, Tensor]:
    import safetensors.torch

    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{path} has changed since it was written: its checksum is another")
    tensors: Mapping[str, Tensor] = safetensors.torch.load(content)
    return tensors


class PartWriter:
    """Writes the parts of one process.

    Args:
        folder: where; it has to be there.
        rank: of this process.
        samples: of a part: what is kept in memory before it is written.
    """

    def __init__(self, folder: Path, rank: int, samples: int) -> None:
        self.folder = folder
        self.written: list[dict[str, Any]] = []
        self.tensors: list[str] = []
        self._rank = rank
        self._samples = samples
        self._kept: list[dict[str, Tensor]] = []
        self._count = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in a batch: ``features``, ``indices`` and, perhaps, ``targets``, as many rows each.

        Raises:
            DataError: it has other tensors than the batches before it.
            OSError: the disk does not take a part.
        """
        names = sorted(tensors)
        if self.tensors and names != self.tensors:
            raise DataError(f"a batch has {names}, and those before it {self.tensors}")
        self.tensors = names
        # Copied: a view would keep what it is a view of, and the host may reuse its memory.
        self._kept.append({name: t.detach().cpu().clone() for name, t in tensors.items()})
        self._count += len(tensors["indices"])
        if self._count >= self._samples:
            self.flush()

    def flush(self) -> None:
        """Write what is kept as a part; without anything, nothing.

        Raises:
            OSError: the disk does not take it.
        """
        if not self._kept:
            return
        import safetensors.torch

        joined = {
            name: torch.cat([batch[name] for batch in self._kept]).contiguous()
            for name in self.tensors
        }
        content = safetensors.torch.save(joined)
        name = f"part-{self._rank:05d}-{len(self.written):05d}.safetensors"
        disk.replace(self.folder / name, lambda file: file.write(content))
        self.written.append(
            {
                "file": name,
                "samples": self._count,
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )
        self._kept, self._count = [], 0


def begin(folder: Path) -> Path:
    """Make the folder that parts are written to until all are there; an old one is emptied.

    Raises:
        OSError: it cannot be made.
        DataError: there is something else than features under the name that it is to get.
    """
    check_free(folder)
    _bring_back(folder)
    unfinished = folder.with_name(folder.name + UNFINISHED)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    disk.make_folder(unfinished)
    return unfinished


def _set_aside(folder: Path) -> Path:
    """Where an earlier set waits until the new one has its name."""
    return folder.with_name(f".{folder.name}.old")


def _bring_back(folder: Path) -> None:
    """Undo what a killed process left: what was set aside gets its name back, or is not needed."""
    old = _set_aside(folder)
    if not old.exists():
        return
    if folder.exists() or not (old / MANIFEST).is_file():
        shutil.rmtree(old)
    else:
        os.rename(old, folder)


def check_free(folder: Path) -> None:
    """Raises DataError where what is there is neither nothing nor features."""
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise DataError(
            f"{folder} is there, and holds no {MANIFEST}: only features are replaced by features"
        )


def finish(
    folder: Path,
    written: Sequence[Mapping[str, Any]],
    tensors: Sequence[str],
    about: dict[str, Any],
) -> int:
    """Name the parts of all processes in ``features.json``, and give the folder its name.

    What had the name before is replaced.

    Returns:
        The number of samples.

    Raises:
        DataError: a part is not there, since the processes do not share the disk.
        OSError: the disk does not take it.
    """
    unfinished = folder.with_name(folder.name + UNFINISHED)
    for part in written:
        if not (unfinished / part["file"]).is_file():
            raise DataError(
                f"{unfinished / part['file']} was written and is not here: all processes need the "
                f"same folder; put train_step.folder on a disk that all machines share"
            )
    samples = sum(int(part["samples"]) for part in written)
    content = {
        "format": _FORMAT, **about, "samples": samples, "tensors": list(tensors), "parts": written
    }  # fmt: skip
    text = json.dumps(content, indent=1) + "\n"
    disk.replace(unfinished / MANIFEST, lambda file: file.write(text.encode()))
    disk.flush(unfinished)
    check_free(folder)
    _bring_back(folder)
    old = _set_aside(folder)
    if folder.exists():
        os.rename(folder, old)
    os.rename(unfinished, folder)
    disk.flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return samples
