"""Train step ``contrastive``: two views of every sample, compared over the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.gathered import Gathered
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.registry import register_train_step
from phaseloop.engine.step_sets import check_takes_output
from phaseloop.engine.step_views import check_two_views
from phaseloop.engine.task import Task
from phaseloop.engine.trees import map_tensors


def _check(task: Task, step: Any) -> None:
    """Raises ConfigError for what the step needs and the task has not."""
    if task.criterion_module is None:
        raise ConfigError("criterion", "the step contrastive needs one, and there is none")
    check_two_views(task, step)
    hint = ': the step contrastive asks in tests for features, as model(input, output="features")'
    check_takes_output(task, step, "model", hint)


@register_train_step("contrastive", whole_model_forward=True, one_piece=True, check=_check)
def contrastive_train_step(task: Task) -> None:
    """One update by a loss that compares two views of each sample over the whole batch.

    ``batch.input`` of a training batch is a pair of views [B, ...], which go through the model as
    one, [2B, ...]. What it gives may be a tensor or any tree of tensors with rows. The criterion is
    called with ``(first, second)``, the rows of this process, n of each view, and
    :class:`Gathered`, the N rows of all processes. It gives either the mean over the n own rows
    (and 0 where there are none), or a function of the N rows alone, the same on every process:
    either way the update is that of the whole batch on one process.

    In a test phase the model is called as ``model(input, output="features")``, and the meters get
    ``(features, target)``; there is no loss.
    """
    batch = task.next_batch()
    if not task.train:
        features = task.forward(batch.input, output="features")
        task.measure(None, features, batch.target)
        return
    rows = batch.weight  # of a stand-in, none: its sample is another process's
    own = _halves(task.forward(_together(batch.input)), rows)
    start, everyone = 0, own
    if task.backend.world_size > 1:
        by_rank = _by_rank(task, rows)
        start, everyone = sum(by_rank[: task.backend.rank]), _gathered(task, own, by_rank)
    loss = task.criterion(own, Gathered(*everyone, start))
    task.backward(loss)
    task.update()


def _together(views: Any) -> Tensor:
    """Both views as one batch [2B, ...]."""
    if not (isinstance(views, (tuple, list)) and len(views) == 2):
        raise ConfigError(
            "data.train.views",
            f"the step contrastive compares two views of each sample, and the batch's input is "
            f"{_described(views)}; set data.train.views=2",
        )
    return torch.cat([*views])


def _halves(output: Any, rows: int) -> tuple[Any, Any]:
    """The first ``rows`` rows of each view."""
    first = map_tensors(lambda t: t.narrow(0, 0, rows), output)
    second = map_tensors(lambda t: t.narrow(0, len(t) // 2, rows), output)
    return first, second


def _by_rank(task: Task, rows: int) -> list[int]:
    """The rows of each process."""
    known = task.loaders[TRAIN].plan.shares(task.accumulator.window.samples)
    if known is not None:
        return known
    counts = torch.zeros(task.backend.world_size, dtype=torch.int64)
    counts[task.backend.rank] = rows
    found: list[int] = task.backend.total_on_host(counts).tolist()
    return found


def _gathered(task: Task, own: Any, by_rank: list[int]) -> Any:
    """The same tree with the rows of all processes, gathered at once."""
    leaves: list[Tensor] = []
    map_tensors(lambda tensor: leaves.append(tensor) or tensor, own)  # type: ignore[func-returns-value]
    found = iter(task.backend.gather_all_with_grad(leaves, by_rank))
    return map_tensors(lambda _: next(found), own)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)
