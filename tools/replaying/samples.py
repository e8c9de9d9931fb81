"""Samples behind a value that is not finite: in the data, and one by one through the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phaseloop.engine import registry
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.stepping import loss_of
from phaseloop.engine.task import Task
from phaseloop.tools.replaying.found import BadData, Sample
from phaseloop.tools.replaying.values import bad_rows, count_bad, state_of

_KNOWN_STEPS = ("standard", "closure")


def roots(task: Task) -> dict[str, nn.Module]:
    """The modules of a task, by what the names of their parameters begin with."""
    criterion = task.criterion_module
    own = {"criterion.": criterion} if isinstance(criterion, nn.Module) else {}
    return {"": task.bare_model, **own}


def ids(task: Task, batch: Batch, rows: list[int] | None = None) -> list[Sample]:
    """Indices in the dataset of some samples, or all; of a mix with the name of the source."""
    indices: list[int] = batch.indices.tolist()
    named: list[Sample] = list(indices)
    if batch.sources is not None:
        data = task.stages.data(task.stages.given[task.progress.stage])
        names = list(data.first.names) if data is not None else []
        sources = batch.sources.tolist()
        named = [f"{names[s]}/{i}" for s, i in zip(sources, indices, strict=True)]
    return named if rows is None else [named[row] for row in rows]


def bad_data(task: Task, batch: Batch, number: int) -> Iterator[tuple[BadData, Tensor]]:
    """Every tensor of a micro-batch that is not finite.

    Args:
        number: of the micro-batch.
    """
    for path, value in pytree.tree_flatten_with_path(batch.data)[0]:
        if not isinstance(value, Tensor) or not any(state_of(value)):
            continue
        rows = bad_rows(value, batch)
        name = _name(path, value, batch)
        yield BadData(name, number, ids(task, batch, rows), count_bad([value])), value


def _name(path: Any, value: Tensor, batch: Batch) -> str:
    if value is batch.input:
        return "input"
    return "target" if value is batch.target else f"batch{pytree.keystr(path)}"


def alone(
    task: Task, state: Mapping[str, Tensor], batch: Batch, backward: bool
) -> list[int] | None:
    """Rows of the micro-batch that go wrong by themselves, found by halving.

    The model is in evaluation mode for it, so that neither random draws nor the other samples
    have a part in the answer.

    Args:
        state: the model's parameters and buffers at the beginning of the update.
        backward: look at the gradients too.

    Returns:
        None where the step is not one that puts ``batch.input`` through the model and gives the
        criterion what comes out, or the batch cannot be cut.
    """
    steps = [registry.train_steps.get(n).target for n in _KNOWN_STEPS if n in registry.train_steps]
    step = getattr(task.train_step, "step", task.train_step)
    if step not in steps or not callable(task.criterion_module):
        return None
    task.bare_model.load_state_dict(state)
    task.bare_model.eval()

    def search(rows: list[int]) -> list[int]:
        if _finite(task, _cut(batch, rows), backward):
            return []
        if len(rows) == 1:
            return rows
        half = len(rows) // 2
        return search(rows[:half]) + search(rows[half:])

    try:
        return search(list(range(batch.size)))
    except Exception:
        # A model or criterion may refuse a part of a batch; then nothing is said of samples alone.
        return None


def _finite(task: Task, batch: Batch, backward: bool) -> bool:
    parameters = [p for p in task.bare_model.parameters() if p.requires_grad]
    with torch.set_grad_enabled(backward):
        output = task.compute(task.bare_model, batch.input)
        loss, _ = loss_of(task.criterion_module(output, batch.target))
        if not bool(torch.isfinite(loss).all()):
            return False
        if not backward:
            return True
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)


def _cut(batch: Batch, rows: list[int]) -> Batch:
    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if len(value) != batch.size:
            raise ValueError("a tensor of the batch has no row for each sample")
        return value[rows]

    data = pytree.tree_map(part, batch.data)
    sources = None if batch.sources is None else batch.sources[rows]
    return Batch(data, batch.indices[rows], len(rows), sources)
