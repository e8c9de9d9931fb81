"""Choosing: which checkpoint of a run is meant, and the weights in it, raw or averaged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from phaseloop.engine.checkpoint.names import is_name
from phaseloop.engine.checkpoint.source import Source, content_of, is_folder, join
from phaseloop.engine.errors import CheckpointError, ConfigError, listing, nearest
from phaseloop.engine.run_folder import RESOLVED, RunFolder
from phaseloop.engine.urls import Place

log = logging.getLogger("phaseloop")


def read_checkpoint(where: Place, which: str | None, averages: str | None, key: str) -> Source:
    """The weights of a checkpoint, or an average that a hook kept beside them.

    Args:
        where: the folder of a checkpoint, or of a run.
        which: of a run: ``newest`` (also None), ``best``, or a checkpoint's name.
        averages: name of the hook; None: the raw weights.
        key: of the options ``path``, ``which`` and ``averages``, for messages.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or there is no such average.
    """
    saved = checkpoint_at(where, which, key)
    try:
        state = model_state(saved, averages, key)
    except CheckpointError as error:
        raise ConfigError(join(key, "path"), str(error)) from None
    file = STATE if averages else MODEL
    what = f"the average of hooks.{averages} in {saved.path}" if averages else str(saved.path)
    chosen = None if _is_one(where) else saved.path.name
    return Source(state, saved.manifest["files"][file]["sha256"], what, chosen)


def checkpoint_at(where: Place, which: str | None, key: str) -> store.Saved:
    """The checkpoint that is meant, every byte of it checked.

    Raises:
        ConfigError: as :func:`read_checkpoint`.
    """
    try:
        if _is_one(where):
            if which is not None:
                raise ConfigError(join(key, "which"), f"{where} is one checkpoint; leave it out")
            return store.verified(where)
        checkpoints = store.Store(_checkpoints_of(where))
        if which not in (None, "newest", "best"):
            names = checkpoints.names()
            if which not in names:
                hint = nearest(str(which), names)
                raise ConfigError(
                    join(key, "which"),
                    f"{which!r} is not newest, best or a checkpoint of {where}.{hint} "
                    f"There are: {listing(names)}",
                )
            return store.verified(checkpoints.folder / str(which))
        newest = next(checkpoints.whole(set_aside=False), None)
        if newest is None:
            raise ConfigError(join(key, "path"), f"{where} holds no whole checkpoint")
        last = checkpoints.names()[-1]
        if which == "best":
            return _best(checkpoints, newest, last, key)
        if newest.path.name != last:
            log.warning("%s is damaged: what is taken is %s, before it", last, newest.path.name)
        return newest
    except CheckpointError as error:
        raise ConfigError(join(key, "path"), str(error)) from None


def checkpoints_at(where: Place) -> Place | None:
    """The folder of a run's checkpoints; None: it is one checkpoint.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return None if _is_one(where) else _checkpoints_of(where)
    except CheckpointError as error:
        raise ConfigError("run", str(error)) from None


def _is_one(where: Place) -> bool:
    return is_name(where.name) or _holds(where, store.MANIFEST)


def _checkpoints_of(where: Place) -> Place:
    """The folder of checkpoints that is meant by it or by the folder of its run."""
    if _holds(where, "checkpoints"):
        return where / "checkpoints"
    if isinstance(where, Path) and (where / RESOLVED).exists():
        return RunFolder.found(where).checkpoints  # they may lie elsewhere
    return where


def _holds(where: Place, name: str) -> bool:
    below = where / name
    if isinstance(below, Path):
        return below.exists()
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(str(below), **below.options)
        return bool(system.exists(path))
    except Exception as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def _best(checkpoints: store.Store, newest: store.Saved, last: str, key: str) -> store.Saved:
    """The best by what the newest one's hook ``checkpoint``, of whatever name, has noted.

    Raises:
        ConfigError: the newest, ``last``, is damaged, so nobody knows; or the run keeps none.
    """
    if newest.path.name != last:
        raise ConfigError(
            join(key, "which"),
            f"the newest checkpoint notes which is the best, and {last} is damaged. Name one: "
            f"{listing(name for name in checkpoints.names() if name != last)}",
        )
    for state in store.load(newest, STATE)["hooks"].values():
        if isinstance(best := state.get("best"), list) and "written" in state and best:
            return store.verified(checkpoints.folder / best[0][3])
    raise ConfigError(
        join(key, "which"),
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
            join(key, "averages"),
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


def sha256_of(where: Place, which: str | None, averages: str | None, key: str) -> str:
    """The checksum that reading the file, or the checkpoint, would give.

    Raises:
        ConfigError: there is nothing that can be read.
    """
    if is_folder(where):
        saved = checkpoint_at(where, which, key)
        return str(saved.manifest["files"][STATE if averages else MODEL]["sha256"])
    return content_of(where, key)[0]
