"""What a replay needs of a run's folder: its configuration and a checkpoint; only read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from phaseloop.engine.checkpoint import contents, store
from phaseloop.engine.checkpoint.compare import MAY_CHANGE, forbidden_changes
from phaseloop.engine.config import compose as composing
from phaseloop.engine.config import schema as schemas
from phaseloop.engine.config.components import Components
from phaseloop.engine.errors import CheckpointError, ConfigError, DamagedError
from phaseloop.engine.run_folder import RESOLVED, RunFolder
from phaseloop.engine.urls import Place, Url, place, same
from phaseloop.tools import one_process

_NAMED = re.compile(r"\bupdate (\d+)\b")


@dataclasses.dataclass
class Start:
    """Where a replay begins.

    Attributes:
        saved: the checkpoint; None: the beginning of the run.
        passed_over: damaged ones that would have been nearer, with what is wrong.
    """

    saved: store.Saved | None
    passed_over: list[str]


def run_folder(word: str) -> RunFolder:
    """The folder of a run.

    Raises:
        ConfigError: there is none, or it is not one; runs that there are, are named.
    """
    folder = RunFolder.found(Path(word))
    if (folder.path / RESOLVED).is_file() or (folder.path / "checkpoints").is_dir():
        return folder
    problem = "is not the folder of a run" if folder.path.is_dir() else "does not exist"
    near = folder.path.parent if folder.path.parent.is_dir() else Path.cwd()
    runs = sorted(path.parent.name for path in near.glob(f"*/{RESOLVED}"))
    there = f"; in {near} there are: {', '.join(runs)}" if runs else ""
    raise ConfigError("run", f"{word} {problem}{there}")


def default_update(folder: RunFolder) -> int:
    """The update that the run's failure names, or else the one after the newest checkpoint."""
    status = folder.status()
    named = _NAMED.search(str(status.get("reason")))
    if status.get("status") == "failed" and named:
        return max(1, int(named[1]))
    names = store.Store(folder.checkpoints).names()
    return store.position(names[-1])[0] + 1 if names else 1


def find_start(folder: RunFolder, update: int, resume: str) -> Start:
    """The newest whole checkpoint before ``update``, or the start that the run itself had.

    Args:
        resume: ``run.resume`` of the run.

    Raises:
        CheckpointError: the run began at another's checkpoint, and that is gone, or not before
            ``update``.
    """
    checkpoints = store.Store(folder.checkpoints)
    passed_over: list[str] = []
    names = checkpoints.names()
    for name in reversed([name for name in names if store.position(name)[0] < update]):
        try:
            return Start(store.verified(checkpoints.folder / name), passed_over)
        except DamagedError as error:
            passed_over.append(str(error))
        except CheckpointError as error:
            if name in checkpoints.names():  # else a training at work has removed it
                raise
            passed_over.append(str(error))
    origin = _origin(checkpoints, names, resume)
    if origin is None:
        return Start(None, passed_over)
    try:
        saved = store.verified(origin)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder.path} holds no checkpoint before update {update}, and the one that the run "
            f"began with cannot be used: {error}"
        ) from None
    if saved.position[0] >= update:
        raise CheckpointError(
            f"the run began after update {saved.position[0]}, with {origin}: update {update} is "
            f"another run's"
        )
    return Start(saved, passed_over)


def _origin(checkpoints: store.Store, names: Sequence[str], resume: str) -> Place | None:
    """The checkpoint of another run that this one began with."""
    here = checkpoints.folder
    options = here.options if isinstance(here, Url) else {}
    for name in reversed(names):
        try:
            saved = store.verified(checkpoints.folder / name)
        except CheckpointError:
            continue
        paths = [place(origin["path"], options) for origin in saved.manifest["origins"]]
        foreign = [path for path in paths if not same(path.parent, here)]
        return foreign[-1] if foreign else None
    start = place(resume, options)
    if resume in ("auto", "never") or same(start.parent, here):
        return None
    return start.resolve() if isinstance(start, Path) else start


def configuration(folder: RunFolder, update: int) -> tuple[dict[str, Any], str]:
    """The configuration that made ``update``, and where it was found.

    A run may have been continued with another length: what the next checkpoint after the update
    says is nearer to it than ``resolved.yaml``, which is of the last start.

    Raises:
        ConfigError: there is none, since the run was made in Python.
    """
    checkpoints = store.Store(folder.checkpoints)
    for name in checkpoints.names():
        if store.position(name)[0] >= update:
            try:
                saved = store.verified(checkpoints.folder / name)
                found = store.load(saved, contents.STATE)["config"]
            except CheckpointError:
                continue
            if found:
                return found, f"as {name} has it"
    found = folder.config()
    if not found:
        raise ConfigError(
            "run",
            f"{folder.path} holds no {RESOLVED} that can be read; a run made in Python is replayed "
            f"in Python: phaseloop.tools.replay.replay(folder, update, make=...)",
        )
    return found, f"{RESOLVED} of the run"


def with_overrides(config: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The configuration with some keys changed.

    Raises:
        ConfigError: a word that cannot be read or is no ``key=value``.
    """
    changed = dict(config)
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except OverrideParseException as error:
            raise ConfigError(f"override {word!r}", f"cannot be read: {error}") from None
        key = override.key_or_group
        if override.is_sweep_override() or override.is_delete():
            raise ConfigError(key, "a replay takes one value for a key, and deletes none")
        value: Any = override.value()
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False)
        layer: Any = value
        for part in reversed(key.split(".")):
            layer = {part: layer}
        changed = composing.merge(changed, layer)
    return changed


def checked(config: Mapping[str, Any], changed: Mapping[str, Any]) -> schemas.Schema:
    """The changed configuration as dataclasses.

    Raises:
        ConfigError: a key or value that the schema does not allow, a module of ``imports`` that is
            not found, or a change that makes another training.
    """
    schema = schemas.check(dict(changed))
    try:
        Components(schema.imports, schema.allow_targets)
    except ConfigError as error:
        raise ConfigError(
            "",
            f"{error} (files are looked for from {Path.cwd()}: replay where the run was started)",
        ) from None
    now = dataclasses.asdict(schema)
    before = dataclasses.asdict(schemas.check(dict(config)))
    if changes := forbidden_changes(before, now):
        keys = ", ".join(key for key in MAY_CHANGE if key not in ("plan", "only", "weights"))
        raise ConfigError(
            changes[0].split(":")[0],
            f"this would be another training, and no replay: {'; '.join(changes)}. What may "
            f"change: {keys}, and hooks that only watch",
        )
    # What the run itself had is its business: it may have had many processes.
    new = {key: v for key, v in now["backend"].items() if before["backend"].get(key) != v}
    one_process.check_backend(new, "a replay")
    if now["launch"] != before["launch"]:
        one_process.check_launch(schema.launch, "a replay")
    for key in ("plan", "only"):
        if getattr(schema, key):
            raise ConfigError(key, "is for tools/run.py")
    return schema
