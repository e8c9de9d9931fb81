"""Sources of weights: files of torch's and of safetensors'; nothing in them is run."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.checkpoint.reading import checksum, why_refused
from phaseloop.engine.errors import ConfigError, listing
from phaseloop.engine.urls import Place

_MOST_NESTED = 6
_OF_TORCH = (b"PK", b"\x80")  # a zip file, or a pickle
TIED = "tied"
"""In a safetensors file's metadata: names left out, each with the name of its tensor, as JSON."""


@dataclass(frozen=True)
class Source:
    """Weights that were read.

    Attributes:
        state: name to tensor, or to a module's extra state.
        sha256: of the file that they lie in.
        place: what was read, for messages.
        checkpoint: name of the one that was chosen among a run's; None: there was no choice.
    """

    state: Mapping[str, Any]
    sha256: str
    place: str
    checkpoint: str | None = None


def join(key: str, option: str) -> str:
    """The full key of an option; of a program's own words, ``key`` is empty."""
    return f"{key}.{option}" if key else option


def is_folder(where: Place) -> bool:
    """It is a folder, of a checkpoint or of a run; where that cannot be asked, it is none."""
    if isinstance(where, Path):
        return where.is_dir()
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(str(where), **where.options)
        return bool(system.isdir(path))
    except Exception:  # each kind of place has its own; reading it will say what is wrong
        return False


def read_file(where: Place, at: str | None, key: str) -> Source:
    """The state in a file of torch's or of safetensors'.

    Args:
        where: the file.
        at: where in it the state lies, as in ``model.trunk``; None: the file is one.
        key: of the options ``path`` and ``at``, for messages.

    Raises:
        ConfigError: it cannot be read, would have to run code to be loaded, or holds no state.
    """
    sha256, data = content_of(where, key)
    try:
        found = _load(data)
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(join(key, "path"), _why_not(data, error, str(where))) from error
    return Source(_state_at(found, at, str(where), key), sha256, str(where))


def content_of(where: Place, key: str) -> tuple[str, Path | io.BytesIO]:
    """Checksum of a file, and where to read it from; what lies elsewhere is fetched once."""
    import fsspec

    try:
        if isinstance(where, Path):
            with open(where, "rb") as file:
                return checksum(file)[1], where
        with fsspec.open(str(where), "rb", **where.options) as file:
            content = file.read()
    except Exception as error:  # each kind of place has its own
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(join(key, "path"), f"{where} cannot be read: {said}") from error
    return hashlib.sha256(content).hexdigest(), io.BytesIO(content)


def _why_not(data: Path | io.BytesIO, error: Exception, shown: str) -> str:
    """Why a file was not loaded: what it is, and not how torch would run it."""
    head = _head(data)
    if not head:
        return f"{shown} is empty"
    # A text may begin like a pickle that asks for something.
    if head.startswith(_OF_TORCH) and (reason := why_refused(error)):
        return (
            f"{shown} was not loaded: a file of weights holds tensors and plain Python, and "
            f"nothing in it is run; {reason}"
        )
    return f"{shown} was not loaded: it is cut off, or no file of torch's or safetensors'"


def _head(data: Path | io.BytesIO) -> bytes:
    if not isinstance(data, Path):
        return data.getvalue()[:9]
    with open(data, "rb") as file:
        return file.read(9)


def _load(data: Path | io.BytesIO) -> Any:
    """By what the file begins with, whatever it is called."""
    if _head(data)[8:9] != b"{":  # safetensors: the header's length in eight bytes, then JSON
        return torch.load(data, map_location="cpu", weights_only=True)
    import safetensors.torch

    if isinstance(data, Path):
        state = safetensors.torch.load_file(data)
        with safetensors.safe_open(data, framework="pt") as opened:
            metadata = opened.metadata() or {}
    else:
        content = data.getvalue()
        state = safetensors.torch.load(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    for name, first in json.loads(metadata.get(TIED, "{}")).items():
        state[name] = state[first]
    return state


def _state_at(found: Any, at: str | None, path: str, key: str) -> Mapping[str, Any]:
    """The mapping of names to tensors in what a file holds."""
    state = found
    for done, part in enumerate(parts := at.split(".") if at else []):
        rest = ".".join(parts[done:])
        if isinstance(state, Mapping) and rest in state:
            state = state[rest]
            break
        if not isinstance(state, Mapping) or part not in state:
            raise ConfigError(join(key, "at"), f"{path} has no {at!r}. {_where(found)}")
        state = state[part]
    if not _is_state(state):
        place = f"{path} at {at}" if at else path
        raise ConfigError(
            join(key, "at"), f"{place} is no mapping of names to tensors. {_where(found)}"
        )
    return dict(state)


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(item, Tensor) for item in value.values())
    )


def _where(found: Any) -> str:
    """Where else in a file there are names with tensors, for a message."""
    places = dict(_places(found, ""))
    if places:
        best = sorted(places, key=lambda place: -places[place])[:5]
        return f"There are tensors at: {', '.join(best)}"
    keys = listing(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
    return f"It holds no tensors by name, but: {keys[:300]}"


def _places(value: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    if not isinstance(value, Mapping) or depth > _MOST_NESTED:
        return
    if _is_state(value):
        yield prefix or "the top: leave it out", len(value)
    for name, item in value.items():
        if isinstance(name, str):
            yield from _places(item, f"{prefix}.{name}" if prefix else name, depth + 1)
