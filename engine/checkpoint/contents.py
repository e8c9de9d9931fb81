"""What is in a checkpoint, and how a task takes it back.

``model.pt`` holds parameters and buffers by the bare model's names; ``state.pt`` everything else.
Both hold tensors and plain Python only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from phaseloop.engine import environment, shards
from phaseloop.engine.checkpoint import rank_state, store
from phaseloop.engine.checkpoint.loader_state import restore_loaders
from phaseloop.engine.checkpoint.on_host import fetched
from phaseloop.engine.checkpoint.optimizer_state import load_named_state, named_state
from phaseloop.engine.checkpoint.snapshot import compact
from phaseloop.engine.checkpoint.writer import flush_all
from phaseloop.engine.data.transfer import to_device
from phaseloop.engine.errors import CheckpointError, PhaseloopError
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.swapping import places

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

MODEL = "model.pt"
STATE = "state.pt"

_LEAVES = (
    torch.Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device,
    bool, int, float, complex, str, bytes, type(None),
)  # fmt: skip


class Collected(NamedTuple):
    """A checkpoint that is still to be written.

    Attributes:
        name: of its folder.
        parts: file name to content: the state itself, which the next step changes.
        facts: what its manifest says beside sizes and checksums.
        files: what has to be on the disk before it, since its state counts on them.
        own: ``id`` of every tensor in it that is a copy already, which nothing changes.
    """

    name: str
    parts: dict[str, Any]
    facts: dict[str, Any]
    files: list[Path]
    own: set[int]


def save(task: Task) -> store.Saved:
    """Write a checkpoint of the task as it stands; when this returns it is on disk.

    Raises:
        PhaseloopError, NonFiniteError, CheckpointError: see :func:`collect`.
        CheckpointError: it could not be written; the checkpoints before it are untouched.
    """
    task.writer.settle()
    name, parts, facts, files, _ = collect(task)
    assert task.store is not None
    flush_all(files)
    saved = task.store.write(name, compact(parts), facts)
    count(task)
    return saved


def collect(task: Task) -> Collected:
    """What a checkpoint of the task as it stands is made of; nothing is copied.

    Only sharded tensors are: whole, for the primary. Other processes have None in their places.
    And those of a lazy device are.

    Raises:
        PhaseloopError: the task has no run folder, or a window is open.
        NonFiniteError: the state is not finite, and hook ``non_finite`` is on.
        CheckpointError: it holds something that could not be loaded again.
    """
    if task.store is None:
        raise PhaseloopError("a task without run.dir cannot be saved")
    if not task.at_border:
        raise PhaseloopError(
            f"a checkpoint was asked for inside the window of update {task.progress.updates + 1}; "
            f"save in on_step when task.updated, or in on_phase_end"
        )
    for check in task.before_save:
        check(task)
    progress = task.progress
    number = progress.saves + 1
    small = task.test_entry if task.test_entry is not None else small_state(task)
    small["progress"]["saves"] = number
    parts = {MODEL: task.raw_state(), STATE: {**small, **_large_state(task)}}
    own: set[int] = set()
    parts = shards.whole(fetched(parts, task.backend, own), keep=task.primary, made=own)
    for part in parts.values():
        check_plain(part)
    name = store.folder_name(progress.updates, number)
    return Collected(name, parts, _facts(task), task.hooks.files(), own)


def count(task: Task) -> None:
    """A checkpoint of the state as it stands is written, or its copy is on its way."""
    task.progress.saves += 1
    task.changed = False


def check_plain(value: Any, path: str = "") -> None:
    """Refuse what ``torch.load(weights_only=True)`` would refuse: now, not at the resume.

    Args:
        value: a tree of dicts, lists, tuples, sets, tensors, numbers, strings and None.
        path: where it stands, for the message.

    Raises:
        CheckpointError: something else is in it, such as a NumPy number.
    """
    kind = type(value)  # exactly: a subclass of float or dict is pickled by its own name
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, f"a key of {path}")
            if _has_tensor(key):  # it is not copied: the next step would change what is written
                raise CheckpointError(
                    f"a key of {path} is or has a tensor; use its name or its number"
                )
            check_plain(item, f"{path}.{key}" if path else str(key))
    elif kind in (list, tuple, set):
        for number, item in enumerate(value):
            check_plain(item, f"{path}.{number}")
    elif kind not in _LEAVES:
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which could not be loaded again: "
            f"a checkpoint holds tensors, numbers, strings, and lists and dicts of them"
        )


def _has_tensor(key: Any) -> bool:
    if isinstance(key, tuple):
        return any(map(_has_tensor, key))
    return isinstance(key, torch.Tensor)


def small_state(task: Task) -> dict[str, Any]:
    """Everything but parameters: also what a test phase may change; a collective."""
    of_ranks = rank_state.gathered(task)
    return {
        "progress": task.progress.state_dict(),
        "hooks": task.hooks.state_dict(),
        "schedules": {name: rates.state_dict() for name, rates in task.rates.items()},
        "metrics": dict(task.metrics),
        "best": dict(task.best),
        "steps": [state_of(step) for step, _ in task.stages.steps],
        **of_ranks,
    }


def restore(task: Task, saved: store.Saved) -> dict[str, Any]:
    """Model, optimizers, progress and meters of a verified checkpoint; its ``state.pt``.

    Hooks and random states follow later: see :func:`restore_random`.

    Raises:
        CheckpointError: it does not fit the task; the message names what differs.
    """
    state: dict[str, Any] = store.load(saved, STATE)
    task.progress.load_state_dict(state["progress"])
    task.stages.enter()
    load_model(task.bare_model, store.load(saved, MODEL), saved.path)
    _load_part(task.criterion_module, state["criterion"], "criterion")
    _restore_optimizers(task, state["optimizers"])
    _load_part(task.precision.scaler, state["scaler"], "scaler")
    for name, rates in task.rates.items():
        rates.load_state_dict(state["schedules"][name])
    _restore_averages(task, state.get("averages", {}))
    _restore_modes(task, state["evaluating"], state["frozen"])
    rank_state.take(task, state)
    task.metrics, task.best = dict(state["metrics"]), dict(state["best"])
    for (step, _), step_state in zip(task.stages.steps, state["steps"], strict=False):
        _load_part(step, step_state, "train_step")
    restore_loaders(task, rank_state.own_loader_states(task, state))
    task.changed = False
    return state


def restore_random(task: Task, state: dict[str, Any]) -> None:
    """The random states of this rank; last of all, so that no hook can shift them."""
    processes, rank = rank_state.count(state), task.backend.rank
    if processes != task.backend.world_size:
        log.warning(
            "the checkpoint was made by %d processes, this is %d: the same samples in the same "
            "batches, but draws outside the data, and last bits, may differ",
            processes,
            task.backend.world_size,
            extra=ALIKE,
        )
    if rank < processes:
        own = rank_state.of_rank(state, rank)["rng"]
        task.set_host_state(own["host"])
        task.seed_device()  # a checkpoint of another kind of device has no state of this one's
        task.backend.set_rng_state(own["device"])
    else:
        task.seed_all()


def load_model(model: nn.Module, state: dict[str, Any], source: Any) -> None:
    """Parameters and buffers by name.

    Raises:
        CheckpointError: a name is missing or unexpected, or a shape differs; all are named.
    """
    here = model.state_dict()
    problems = [f"only here: {name}" for name in here if name not in state]
    problems += [f"only in the checkpoint: {name}" for name in state if name not in here]
    for name, value in here.items():
        there = state.get(name, value)
        if getattr(value, "shape", None) != getattr(there, "shape", None):
            problems.append(f"{name}: {list(value.shape)} here, {list(there.shape)} there")
    if problems:
        raise CheckpointError(f"the model does not fit {source}: {'; '.join(problems)}")
    with torch.no_grad():
        model.load_state_dict(shards.shares_of(state, here))


def _large_state(task: Task) -> dict[str, Any]:
    names = task.parameter_names()
    trainable = {id(p) for p in task.bare_model.parameters() if p.requires_grad}
    evaluating = {id(module) for module in task.evaluating()}
    return {
        "optimizers": {
            name: named_state(optimizer, names) for name, optimizer in task.optimizers.items()
        },
        "scaler": state_of(task.precision.scaler),
        "criterion": state_of(task.criterion_module),
        "averages": {name: dict(values) for name, values in task.averages.items()},
        "evaluating": [
            name for name, module in task.bare_model.named_modules() if id(module) in evaluating
        ],
        "frozen": [
            name for name, p in task.bare_model.named_parameters() if id(p) not in trainable
        ],
        "config": task.config,
        "identity": task.identity,
        "planned": [plan.updates for plan in task.stages.plans()],
        "environment": environment.facts(task.backend.world_size, task.backend.device_name),
    }


def _facts(task: Task) -> dict[str, Any]:
    return {
        "updates": task.progress.updates,
        "epoch": task.progress.epoch,
        "origins": task.origins,
    }


def _restore_optimizers(task: Task, saved: dict[str, Any]) -> None:
    if not task.optimizers:  # only=test needs none
        return
    if set(saved) != set(task.optimizers):
        raise CheckpointError(
            f"the checkpoint has optimizers {sorted(saved)}, this task {sorted(task.optimizers)}"
        )
    names = task.parameter_names()
    for name, optimizer in task.optimizers.items():
        load_named_state(optimizer, names, saved[name], name)


def _restore_averages(task: Task, saved: dict[str, Any]) -> None:
    """Those of hooks that are in use."""
    kept = {name: values for name, values in saved.items() if name in task.hooks.hooks}
    here = {name: place.tensor for name, place in places(task.bare_model).items()}
    task.averages = {
        name: to_device(shards.shares_of(values, here), task.device)
        for name, values in kept.items()
    }


def _restore_modes(task: Task, evaluating: list[str], frozen: list[str]) -> None:
    for name, module in task.bare_model.named_modules():
        module.training = name not in evaluating
    for name, parameter in task.bare_model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def state_of(thing: Any) -> dict[str, Any]:
    """The state of a step, a criterion or a scaler; empty where it has none."""
    method = getattr(thing, "state_dict", None)
    return dict(method()) if callable(method) and not isinstance(thing, type) else {}


def _load_part(thing: Any, state: dict[str, Any], label: str) -> None:
    if isinstance(thing, nn.Module):
        load_model(thing, state, label)
    elif state and callable(getattr(thing, "load_state_dict", None)):
        thing.load_state_dict(state)
