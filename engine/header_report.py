"""The header: what a run is going to do, in a few lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phaseloop.engine import plan_report
from phaseloop.engine.report import Rows, by_epoch, counted, size
from phaseloop.engine.shards import class_name

if TYPE_CHECKING:
    from phaseloop.engine.data.source import Data
    from phaseloop.engine.task import Task


def header(task: Task) -> Rows:
    """Model, data, phases, machine, folder and, on a resume, where the run stands."""
    sizes = [f"{name} {plan_report.samples(loader)}" for name, loader in task.loaders.items()]
    rows = [
        ("model", _model(task)),
        ("data", ", ".join(sizes)),
        *_phases(task),
        ("machine", _machine(task)),
        ("run folder", str(task.folder.path) if task.folder else "none: nothing is saved"),
    ]
    if task.resumed and not task.test_only:
        rows.append(("resumed", plan_report.position(task)))
    return rows


def _model(task: Task) -> str:
    parameters = list(task.bare_model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    held = size(sum(p.numel() * p.element_size() for p in parameters))
    parts = [class_name(task.bare_model), f"{counted(total, 'parameter')} ({held})"]
    if trainable != total:
        parts.append(f"{trainable:,} of them trainable")
    return ", ".join([*parts, *task.model_options.describe(), task.precision.name])


def _phases(task: Task) -> Rows:
    plans = task.stages.plans()
    if task.test_only or not any(plan.trains for plan in plans):
        return [("phases", "test only")]
    rows: Rows = []
    for index, plan in enumerate(plans):
        name = f"{task.stages.label(index)}: " if task.stages.several else ""
        data = task.stages.data(task.stages.given[index])
        parts = [plan_report.length(plan), *([] if data is None else _batch(data))]
        if tested := plan_report.cadence(plan):
            parts.append(tested)
        rows.append(("" if rows else "phases", name + ", ".join(parts)))
    if len(plans) > 1 and all(plan.updates or not plan.trains for plan in plans):
        rows.append(("", f"{counted(task.stages.updates, 'update')} in all"))
    return rows


def _batch(data: Data) -> list[str]:
    parts = [f"batch size {by_epoch(data.sizes)}"]
    if data.micro_batch_size is not None:
        parts.append(f"micro-batches of {data.micro_batch_size:,}")
    if data.accumulate is not None:
        parts.append(f"{data.accumulate:,} micro-batches each")
    return parts


def _machine(task: Task) -> str:
    processes = task.backend.world_size
    parts = [task.backend.described(), counted(torch.get_num_threads(), "thread")]
    if processes > 1:
        parts.append(f"{processes:,} processes")
    return ", ".join(parts)
