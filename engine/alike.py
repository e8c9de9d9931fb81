"""Alike: what every process of a run has to have the same, compared before the first update.

A process with another learning rate, another seed or another file of weights would train another
model, and nothing would ever show it. All send a checksum; only where one differs do they send
what it is made of, so that the error can name it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phaseloop.engine import assembly
from phaseloop.engine.backends.base import Backend
from phaseloop.engine.checkpoint.compare import by_name, covers
from phaseloop.engine.checkpoint.identity import facts_of_data
from phaseloop.engine.checkpoint.store import Saved
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.facts import fact_of

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

# Keys of a configuration, with all below them, that may differ from machine to machine.
OF_A_MACHINE = (
    "run.dir", "run.checkpoints", "run.storage_options", "run.resume", "run.threads", "run.grace",
    "backend.name", "backend.device", "backend.processes", "backend.nodes", "backend.rendezvous",
    "backend.restarts", "launch", "imports", "allow_targets", "weights",
    "model.weights",  # what is in the file is compared
    *(f"{data}.{key}" for data in ("data.*", "data.test.*", "phases.*.data.train")
      for key in ("workers", "prefetch", "pin_memory")),
)  # fmt: skip

_WITHOUT = ("name", "train", "train_step", "schedule")  # of a stage: the identity has these
_SHOWN = 3


def check(task: Task) -> None:
    """Compare settings, data, model and seed.

    Raises:
        ConfigError, DataError: something differs; names it, with the values of two processes.
    """
    if task.agreement is not None:
        compare(task.backend, _facts(task))


def check_start(task: Task, saved: Saved | None) -> None:
    """Compare what training starts from: a checkpoint, or weights from elsewhere.

    Raises:
        ConfigError: it is not the same on all.
    """
    if task.agreement is None:
        return
    given = task.identity.get("initial_weights") or {}
    facts = {
        "run.resume": "no checkpoint"
        if saved is None
        else f"{saved.path.name}, checksum {saved.manifest['sha256']}",
        **{f"model.weights.{name}": fact_of(given[name]) for name in given if name != "path"},
    }
    compare(task.backend, facts)


def compare(backend: Backend, facts: Mapping[str, Any]) -> None:
    """All come here, each with its own facts: key to a value of plain Python."""
    text = repr(sorted(facts.items()))
    digests = backend.all_gather_object(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    ranks = backend.all_gather_object(dict(facts))
    keys = list(dict.fromkeys(key for rank in ranks for key in rank))
    found = [key for key in keys if len({repr(rank.get(key)) for rank in ranks}) > 1]
    key = found[0]
    more = f"; different are also {', '.join(found[1 : 1 + _SHOWN])}" if found[1:] else ""
    said = f"{_by_rank([rank.get(key) for rank in ranks])}: all processes of a run need the same"
    if key.endswith(".samples"):
        raise DataError(f"{key}: {said}{more}")
    raise ConfigError(key, f"{said}{more}")


def _by_rank(values: list[Any]) -> str:
    """Each value once, with the first process that has it."""
    first: dict[str, int] = {}
    for rank, value in enumerate(values):
        first.setdefault("nothing" if value is None else repr(value), rank)
    shown = [f"{value} on rank {rank}" for value, rank in first.items()]
    return ", ".join(shown[:_SHOWN]) + (", ..." if shown[_SHOWN:] else "")


def _facts(task: Task) -> dict[str, Any]:
    facts = dict(_flat(task.config))
    facts["backend"] = type(task.backend).__name__
    facts["model.weights"] = "none" if task.weights is None else "given"
    for key, data in assembly.all_data(task).items():
        own = {**facts_of_data(data), "micro_batch_size": data.micro_batch_size,
               "accumulate": data.accumulate}  # fmt: skip
        facts.update({f"{key}.{name}": fact_of(value) for name, value in own.items()})
    facts.update(_flat({k: v for k, v in task.identity.items() if k != "data"}))
    for number, stage in enumerate(task.whole_phases):
        prefix = stage.key(number) if task.stages.several else "phases"
        for field in dataclasses.fields(stage):
            if field.name not in _WITHOUT:
                facts[f"{prefix}.{field.name}"] = fact_of(getattr(stage, field.name))
    facts.update(_flat({"debug": dataclasses.asdict(task.debug)}))
    for name, meters in task.meter_sets.items():
        facts[f"meters.{name}"] = sorted(meters.meters)
    for name, tensor in task.bare_model.state_dict(keep_vars=True).items():
        shape = list(getattr(tensor, "shape", ()))
        trained = ", trained" if getattr(tensor, "requires_grad", False) else ""
        facts[f"model: {name}"] = f"{shape} of {getattr(tensor, 'dtype', 'no type')}{trained}"
    return facts


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key by its whole path, without those of a machine."""
    for key, given in value.items():
        path, item = f"{prefix}{key}", by_name(given)
        if any(covers(pattern.split("."), path.split(".")) for pattern in OF_A_MACHINE):
            continue
        if isinstance(item, Mapping):
            yield from _flat(item, f"{path}.")
        elif not (isinstance(item, str) and os.sep in item):  # a place: every machine has its own
            yield path, fact_of(item)
