"""Which checkpoint a run starts from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseloop.engine import environment
from phaseloop.engine.backends.primary import on_primary
from phaseloop.engine.checkpoint import store, weights
from phaseloop.engine.checkpoint.compare import forbidden_changes
from phaseloop.engine.checkpoint.contents import STATE
from phaseloop.engine.checkpoint.remote import owner
from phaseloop.engine.errors import CheckpointError, ConfigError
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.run_folder import METRICS, STATUS, RunFolder, put_aside
from phaseloop.engine.settings import Run
from phaseloop.engine.urls import Place, Url, place, same

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def open_folder(folder: RunFolder, resume: str, checkpoints: store.Store | None = None) -> None:
    """Take the run's folder, and the place of its checkpoints.

    An old run is put aside first with ``resume=never``. So is its folder where its checkpoints are
    gone: its rows and pictures are all that is left of it. One that was killed before its first
    checkpoint has nothing to lose, and begins again where it is.

    Args:
        checkpoints: the store that will be written to; None: one that is not used any further.

    Raises:
        ConfigError: the folder, or where checkpoints shall lie, cannot be written.
        InUseError: another process trains in the folder.
        CheckpointError: where checkpoints lie cannot be read.
    """
    folder.open()  # first of all: it may be another process's, at work in it
    checkpoints = checkpoints or store.Store(folder.checkpoints)
    if folder.elsewhere:
        checkpoints.reach("run.checkpoints")
        _warn_of_memory(checkpoints.folder)
    held = bool(checkpoints.names() or checkpoints.set_aside_before())
    if not held:
        _tell_of_another_place(folder, checkpoints.folder)
    if resume == "never":
        if _has_traces(folder) or (checkpoints.exists() and not folder.elsewhere):
            _put_aside(folder, "run.resume=never")
    elif not held and _had_checkpoints(folder, resume) and not _lies_in(resume, folder):
        _put_aside(folder, "there is no checkpoint to go on from")
    folder.check_checkpoints()
    checkpoints.take(owner(folder.path))
    if resume == "never" and folder.elsewhere and checkpoints.exists():
        moved = checkpoints.put_old_aside()
        log.warning("run.resume=never: the old run's checkpoints are now in %s", moved)


def _has_traces(folder: RunFolder) -> bool:
    """A run has been here."""
    return any((folder.path / name).exists() for name in (STATUS, METRICS))


def _had_checkpoints(folder: RunFolder, resume: str) -> bool:
    """A checkpoint was whole once, or that cannot be ruled out: there are rows of updates.

    The status is renewed with each checkpoint, and has no updates before the first one; but of a
    run that began with another run's checkpoint it has those of that one.
    """
    status = folder.status()
    if status.get("updates") and resume == "auto":
        return True
    try:
        with open(folder.path / METRICS, "rb") as rows:
            return any(not status or b'"event": "save"' in row for row in rows)
    except OSError:
        return False


def _lies_in(resume: str, folder: RunFolder) -> bool:
    """The checkpoint to start from is in the run's folder, and would be moved with it."""
    if resume == "auto":
        return False
    where = place(resume)
    return isinstance(where, Path) and folder.path.resolve() in where.resolve().parents


def _tell_of_another_place(folder: RunFolder, now: Place) -> None:
    """There is no checkpoint where the command says, and the run here had another place."""
    if not _has_traces(folder):
        return
    before = RunFolder.found(folder.path).checkpoints
    if not same(before, now):
        log.warning(
            "there are no checkpoints in %s: the run in %s had run.checkpoints=%s",
            now, folder.path, before,
        )  # fmt: skip


def _warn_of_memory(where: Place) -> None:
    if isinstance(where, Url) and where.protocol == "memory":
        log.warning(
            "run.checkpoints=%s is the memory of this process: every checkpoint is gone when it "
            "ends, and the run cannot be resumed then",
            where,
        )


def _put_aside(folder: RunFolder, why: str) -> None:
    log.warning("%s: the old run is now in %s", why, put_aside(folder.path))
    folder.close()
    folder.open()


def find(task: Task) -> store.Saved | None:
    """The checkpoint to start from, verified; None: start from the beginning.

    The primary alone looks, and moves what has to be moved.

    Raises:
        ConfigError: the folder holds a run of another configuration, or ``run.resume`` names no
            checkpoint that can be used.
        CheckpointError: this process does not see what the primary has found.
    """
    if task.store is None:
        return None
    saved = chosen_by_primary(task, lambda: _find(task))
    task.origins = on_primary(task.backend, lambda: task.origins)
    return saved


def chosen_by_primary(task: Task, choose: Callable[[], store.Saved | None]) -> store.Saved | None:
    """The checkpoint that the primary chooses, verified there, as this process reads it.

    Raises:
        CheckpointError: it is not to be seen from here.
    """
    mine: list[store.Saved | None] = []

    def choose_and_tell() -> tuple[Place, Mapping[str, Any]] | None:
        mine.append(choose())
        return None if mine[0] is None else (mine[0].path, mine[0].manifest)

    told = on_primary(task.backend, choose_and_tell)
    if mine or told is None:
        return mine[0] if mine else None
    where, manifest = told
    if not isinstance(where, Path):
        return store.verified(where)  # fetched to this machine, too
    if not where.is_dir():
        raise CheckpointError(
            f"rank {task.backend.rank} does not see {where}, which rank 0 goes on from: processes "
            f"on several machines need a run.dir that all of them share, or run.checkpoints=URL"
        )
    if store.manifest_of(where)["sha256"] != manifest["sha256"]:
        raise CheckpointError(
            f"on rank {task.backend.rank} {where} is another checkpoint than on rank 0: processes "
            f"on several machines need a run.dir that all of them share, or run.checkpoints=URL"
        )
    return store.Saved(where, manifest)


def _find(task: Task) -> store.Saved | None:
    assert task.store is not None
    checkpoints = task.store
    forced = _given(task.run)
    saved = next(checkpoints.whole(), None) if forced is None else _from_path(checkpoints, forced)
    if saved is None:
        _check_nothing_lost(checkpoints)
        return None
    _check_config(task, saved)
    _tell_of_new_folder(task, saved)
    task.origins = list(saved.manifest["origins"])
    if saved.path == forced:
        _make_way(task, checkpoints, saved)
        task.origins.append({"path": str(forced), "sha256": saved.manifest["sha256"]})
    return saved


def _given(run: Run) -> Place | None:
    """The checkpoint that ``run.resume`` names; None: it names none."""
    if run.resume in ("auto", "never"):
        return None
    where = place(run.resume, run.storage_options)
    return where.resolve() if isinstance(where, Path) else where


def _tell_of_new_folder(task: Task, saved: store.Saved) -> None:
    """On another machine: the checkpoints are there, what the run has logged is not."""
    assert task.folder is not None and task.store is not None
    logs = task.folder.status() or (task.folder.path / METRICS).exists()
    if same(saved.path.parent, task.store.folder) and not logs:
        log.info(
            "%s holds no logs of this run: they begin after update %d",
            task.folder.path, saved.position[0],
        )  # fmt: skip


def warn_about_environment(task: Task, state: dict[str, Any]) -> None:
    """One warning when threads, torch, the processor or compilation differ from those before."""
    backend, before = task.backend, state["environment"]
    now = environment.facts(backend.world_size, backend.device_name)
    key = "model.compile"
    before = {**before, key: state["identity"].get(key, "off")}
    now[key] = task.identity.get(key, "off")
    changed = environment.differences(before, now)
    alike = task.backend.broadcast_object(changed) == changed
    if changed:
        extra = ALIKE if alike else None  # on a machine of another kind
        log.warning("last bits may differ from the run before: %s", changed, extra=extra)


def warn_about_length(task: Task, state: dict[str, Any]) -> None:
    """Warn when schedules are spread over another length, and of a change that changes nothing."""
    planned, plans = state["planned"], [plan.updates for plan in task.stages.plans()]
    over, begun = task.progress.stage, task.progress.stage_updates
    for number, (was, is_now) in enumerate(zip(planned[:over], plans, strict=False)):
        if was != is_now:
            log.warning(
                "stage %s is over: it stays at %d updates, though it is now planned for %d",
                task.stages.label(number),
                was,
                is_now,
                extra=ALIKE,
            )
    before, now = begun + sum(planned[over:]), begun + sum(plans[over:])
    if before != now and any(rates.schedules for rates in task.rates.values()):
        log.warning(
            "the run was planned for %d updates and is now for %d: its schedules are spread over "
            "the new total from here on",
            before,
            now,
            extra=ALIKE,
        )


def _from_path(checkpoints: store.Store, path: Place) -> store.Saved:
    """The newest descendant of ``path`` in this run's folder, or ``path`` itself.

    Where ``path`` is gone, because the run that wrote it has pruned it since, a descendant is
    known by the path alone.
    """
    start, problem = None, ""
    key, value = "path", str(path)
    try:
        start = store.verified(path)
        key, value = "sha256", start.manifest["sha256"]
    except CheckpointError as error:
        problem = f"{error}; use auto, never, or a checkpoint's folder"
    for saved in checkpoints.whole():
        if any(origin[key] == value for origin in saved.manifest["origins"]):
            return saved
    if start is None:
        raise ConfigError("run.resume", problem)
    return start


def _make_way(task: Task, checkpoints: store.Store, start: store.Saved) -> None:
    """Set aside what comes after ``start``, so that the newest checkpoint is a descendant of it."""
    names = checkpoints.names()
    if same(start.path.parent, checkpoints.folder):
        for name in names:
            if store.position(name) > start.position:
                checkpoints.set_aside(name)
    elif names:
        raise ConfigError(
            "run.resume",
            f"{checkpoints.folder} holds the checkpoints of another run, which does not descend "
            f"from {start.path}; use another {_key(task)}",
        )


def _check_nothing_lost(checkpoints: store.Store) -> None:
    """Starting from nothing where there was something would look like a success."""
    if aside := checkpoints.set_aside_before():
        raise CheckpointError(
            f"no checkpoint in {checkpoints.folder} is whole; set_aside/ holds {', '.join(aside)}. "
            f"run.resume=never puts this run aside and starts anew"
        )


def _check_config(task: Task, saved: store.Saved) -> None:
    state = store.load(saved, STATE)
    changes = []
    if state["config"] and task.config:
        changes = forbidden_changes(state["config"], task.config, task.config_defaults)
    # What no file says, and what a task made without files says: compared always.
    changes = [*changes, *weights.changes(task, state["identity"])]
    changes = changes or forbidden_changes(state["identity"], task.identity)
    if changes:
        key = _key(task) if task.run.resume in ("auto", "never") else "run.resume"
        raise ConfigError(
            key,
            f"{saved.path} belongs to a run of another configuration: {'; '.join(changes)}. "
            f"Use another {_key(task)}, or run.resume=never to put the old run aside",
        )


def _key(task: Task) -> str:
    """The key that says where the run's checkpoints lie."""
    return "run.dir" if task.run.checkpoints is None else "run.checkpoints"
