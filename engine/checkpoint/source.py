"""Sources of weights: a file of any kind, or a checkpoint of ours; nothing in them is run."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
from fsspec.core import split_protocol
from torch import Tensor

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from phaseloop.engine.errors import CheckpointError, ConfigError, listing, nearest
from phaseloop.engine.run_folder import RunFolder

_BLOCK = 1 << 20
_MOST_NESTED = 6
TIED = "tied"
"""In a safetensors file's metadata: names left out, each with the name of its tensor, as JSON."""


@dataclass(frozen=True)
class Source:
    """Weights that were read.

    Attributes:
        state: name to tensor, or to a module's extra state.
        sha256: of the file that they lie in.
        place: what was read, for messages.
    """

    state: Mapping[str, Any]
    sha256: str
    place: str


def _join(key: str, option: str) -> str:
    return f"{key}.{option}" if key else option


def local(path: str) -> Path | None:
    """The local path; None: it is a place of ``fsspec``'s, such as ``s3://bucket/file.pt``."""
    protocol, rest = split_protocol(path)
    return Path(rest) if protocol in (None, "file", "local") else None


# --- files ---


def read_file(path: str, at: str | None, key: str) -> Source:
    """The state in a file of torch's or of safetensors'.

    Args:
        at: where in it the state lies, as in ``model.trunk``; None: the file is one.
        key: of the options ``path`` and ``at``, for messages.

    Raises:
        ConfigError: it cannot be read, would have to run code to be loaded, or holds no state.
    """
    sha256, data = _content(path, key)
    try:
        found = _load(data)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ConfigError(
            _join(key, "path"),
            f"{path} was not loaded: a file of weights holds tensors and plain Python, and nothing "
            f"in it is run ({type(error).__name__}: {reason[:200]})",
        ) from error
    return Source(_state_at(found, at, path, key), sha256, path)


def sha256_of(path: str, which: str | None, averages: str | None, key: str) -> str:
    """What :func:`read_file` or :func:`read_checkpoint` would give as the checksum.

    Raises:
        ConfigError: there is nothing that can be read.
    """
    folder = local(path)
    if folder is not None and folder.is_dir():
        saved = checkpoint_at(folder, which, key)
        return str(saved.manifest["files"][STATE if averages else MODEL]["sha256"])
    return _content(path, key)[0]


def _content(path: str, key: str) -> tuple[str, Path | io.BytesIO]:
    """Checksum of a file, and where to read it from; what lies elsewhere is fetched once."""
    place = local(path)
    try:
        if place is not None:
            return _sha256(place), place
        with fsspec.open(path, "rb") as file:
            content = file.read()
    except Exception as error:  # each kind of place has its own
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(_join(key, "path"), f"{path} cannot be read: {said}") from error
    return hashlib.sha256(content).hexdigest(), io.BytesIO(content)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _load(data: Path | io.BytesIO) -> Any:
    """By what the file begins with, whatever it is called."""
    if isinstance(data, Path):
        with open(data, "rb") as file:
            head = file.read(9)
    else:
        head = data.getvalue()[:9]
    if head[8:9] != b"{":  # safetensors: the header's length in eight bytes, then JSON
        return torch.load(data, map_location="cpu", weights_only=True)
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
            raise ConfigError(_join(key, "at"), f"{path} has no {at!r}. {_where(found)}")
        state = state[part]
    if not _is_state(state):
        place = f"{path} at {at}" if at else path
        raise ConfigError(
            _join(key, "at"), f"{place} is no mapping of names to tensors. {_where(found)}"
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


# --- checkpoints ---


def read_checkpoint(folder: Path, which: str | None, averages: str | None, key: str) -> Source:
    """The weights of a checkpoint, or an average that a hook kept beside them.

    Args:
        folder: a checkpoint's, or a run's.
        which: of a run: ``newest`` (also None), ``best``, or a checkpoint's name.
        averages: name of the hook; None: the raw weights.
        key: of the options ``path``, ``which`` and ``averages``, for messages.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or there is no such average.
    """
    saved = checkpoint_at(folder, which, key)
    try:
        state = model_state(saved, averages, key)
    except CheckpointError as error:
        raise ConfigError(_join(key, "path"), str(error)) from None
    file = STATE if averages else MODEL
    what = f"the average of hooks.{averages} in {saved.path}" if averages else str(saved.path)
    return Source(state, saved.manifest["files"][file]["sha256"], what)


def checkpoint_at(folder: Path, which: str | None, key: str) -> store.Saved:
    """The checkpoint that is meant, every byte of it checked.

    Raises:
        ConfigError: as :func:`read_checkpoint`.
    """
    try:
        if (folder / store.MANIFEST).exists():
            if which is not None:
                raise ConfigError(_join(key, "which"), f"{folder} is one checkpoint; leave it out")
            return store.verified(folder)
        run = RunFolder.found(folder)  # whose checkpoints may lie elsewhere
        held = run.elsewhere or (folder / "checkpoints").is_dir()
        checkpoints = store.Store(run.checkpoints if held else folder)
        if which not in (None, "newest", "best"):
            names = checkpoints.names()
            if which not in names:
                hint = nearest(str(which), names)
                raise ConfigError(
                    _join(key, "which"),
                    f"{which!r} is not newest, best or a checkpoint of {folder}.{hint} "
                    f"There are: {listing(names)}",
                )
            return store.verified(checkpoints.folder / str(which))
        newest = next(checkpoints.whole(set_aside=False), None)
        if newest is None:
            raise ConfigError(_join(key, "path"), f"{folder} holds no whole checkpoint")
        return newest if which != "best" else _best(checkpoints, newest, key)
    except CheckpointError as error:
        raise ConfigError(_join(key, "path"), str(error)) from None


def _best(checkpoints: store.Store, newest: store.Saved, key: str) -> store.Saved:
    """The best by what the newest one's hook ``checkpoint``, of whatever name, has noted."""
    for state in store.load(newest, STATE)["hooks"].values():
        if isinstance(best := state.get("best"), list) and "written" in state and best:
            return store.verified(checkpoints.folder / best[0][3])
    raise ConfigError(
        _join(key, "which"),
        "that run keeps no best checkpoint (hooks.checkpoint.keep_best); use newest",
    )


def model_state(saved: store.Saved, averages: str | None, key: str) -> dict[str, Any]:
    """A whole ``state_dict`` of the model: raw, or with a hook's averages in place of the raw.

    Raises:
        ConfigError: the checkpoint has no such averages.
        CheckpointError: they do not cover the model.
    """
    raw: dict[str, Any] = store.load(saved, MODEL)
    if averages is None:
        return raw
    kept: dict[str, dict[str, Tensor]] = store.load(saved, STATE)["averages"]
    if not kept.get(averages):
        there = [name for name, values in kept.items() if values]
        raise ConfigError(
            _join(key, "averages"),
            f"{saved.path} has no averages of a hook {averages!r}. It has those of: "
            f"{listing(there)}",
        )
    values, first = kept[averages], aliases(raw)
    state = dict(raw)
    for name, value in raw.items():
        if isinstance(value, Tensor):
            known = first.get(name, name)  # an average has a shared tensor by its first name
            if known not in values:
                raise CheckpointError(f"the averages of {saved.path} lack {name}")
            state[name] = values[known]
    return state


def aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Names whose tensor is that of an earlier name, each with the first name of it."""
    seen: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            first = seen.setdefault(place, name)
            if first != name:
                found[name] = first
    return found
