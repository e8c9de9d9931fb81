"""The jobs of the command line, once the configuration's keys are right: train, test, plan."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop.engine import replica
from phaseloop.engine.backends import joining
from phaseloop.engine.checkpoint import contents, store
from phaseloop.engine.config.build import Built, build, make_hooks
from phaseloop.engine.config.components import Components
from phaseloop.engine.config.processes import asked_for
from phaseloop.engine.config.schema import DataSets, Schema
from phaseloop.engine.errors import CheckpointError, ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.run_folder import RunFolder, replace_text
from phaseloop.engine.trainer import Trainer
from phaseloop.engine.urls import is_url, place
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.tools.plan import show_plan

log = logging.getLogger("phaseloop")

_SIGNALLED = 128
_WHILE_TESTING = ("meter_sync", "barrier", "progress", "fit_memory", "watchdog")


def run(schema: Schema) -> int:
    """Do what the configuration asks for; the exit code."""
    if schema.only == "test":
        return _test(schema)
    saves = schema.run.checkpoints is not None and schema.debug.fast is None and not schema.plan
    joined = joining.found()
    if saves and (joined is None or joined.rank == 0):
        # Here too, since data is read before a task is made, and may take an hour.
        store.Store(RunFolder.of(schema.run).checkpoints).reach("run.checkpoints")
    with replica.one_at_a_time:
        built = build(schema)
    if schema.plan:
        started = asked_for(schema.backend)
        show_plan(built, started.processes * started.nodes)
        return 0
    outcome = Trainer(built.task, built.hooks).train()
    return _SIGNALLED + outcome.signal if outcome.signal is not None else 0


def _test(schema: Schema) -> int:
    """Test the weights of a checkpoint of the run; ``test.json`` says what came out."""
    folder = RunFolder.of(schema.run)
    with replica.one_at_a_time:
        built = build(_for_testing(schema))
    if not built.task.test_data:
        raise ConfigError("data.test", "only=test needs test data")
    hooks: dict[str, Hook] = {
        name: hook
        for name, hook in built.hooks.items()
        if name in _WHILE_TESTING or hook.shapes_tests
    }
    found: list[store.Saved] = []

    def choose() -> store.Saved:
        found.append(_weights(schema, folder, built))
        return found[0]

    outcome = Trainer(built.task, hooks).test(choose)
    if outcome.signal is not None:
        return _SIGNALLED + outcome.signal
    task = built.task
    if not task.primary:
        return 0
    result = {
        "weights": found[0].path.name,
        "averaged": bool(task.averages.get(task.swapping.owner)),
        "updates": outcome.updates,
        "metrics": outcome.final,
    }
    text = json.dumps(result, indent=1)
    if schema.debug.fast is None:
        replace_text(folder.path / "test.json", text + "\n")
    print(text)
    return 0


def _for_testing(schema: Schema) -> Schema:
    """Without what belongs to training, unless a hook needs training data to test."""
    run = schema.run
    if not is_url(run.checkpoints or ""):  # else those are for the weights
        schema = dataclasses.replace(schema, run=dataclasses.replace(run, storage_options={}))
    hooks = make_hooks(schema, Components(schema.imports, schema.allow_targets))
    if any(hook.reads_training_data for hook in hooks.values()):
        return dataclasses.replace(schema, schedule=None)
    phases = schema.phases
    if isinstance(phases, list):
        phases = [dataclasses.replace(stage, data=None, schedule=None) for stage in phases]
    return dataclasses.replace(
        schema,
        phases=phases,
        data=DataSets(test=schema.data.test),
        optimizer=None,
        optimizers={},
        schedule=None,
    )


def _weights(schema: Schema, folder: RunFolder, built: Built) -> store.Saved:
    """The checkpoint that ``weights`` means."""
    which = schema.weights
    checkpoints = store.Store(folder.checkpoints)
    try:
        if which not in ("best", "newest"):
            where = place(which, schema.run.storage_options)
            return store.verified(where.absolute() if isinstance(where, Path) else where)
        newest = next(checkpoints.whole(set_aside=False), None)
        if newest is None:
            key = "run.checkpoints" if folder.elsewhere else "run.dir"
            held = folder.checkpoints if folder.elsewhere else folder.path
            raise ConfigError(key, f"{held} holds no checkpoint to test")
        return newest if which == "newest" else _best(checkpoints, newest, built)
    except CheckpointError as error:
        raise ConfigError(
            "weights", f"{error}; use best, newest, or a checkpoint's folder or URL"
        ) from None


def _best(checkpoints: store.Store, newest: store.Saved, built: Built) -> store.Saved:
    states = store.load(newest, contents.STATE)["hooks"]
    for name, hook in built.hooks.items():
        best = states.get(name, {}).get("best") if isinstance(hook, Checkpoint) else None
        if best:
            return store.verified(checkpoints.folder / best[0][3])
    raise ConfigError(
        "weights", "this run keeps no best checkpoint (hooks.checkpoint.keep_best); use newest"
    )
