"""Cut batches: what by its nature makes another update of a batch that is cut, and is warned of.

How a batch is cut into micro-batches, and shared out to processes, changes no update, but for what
looks at all samples of a pass together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.report import counted

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def warn(task: Task) -> None:
    """One line, on the primary, where a batch is cut and something is by nature not indifferent.

    Batch norms that are trained with their batch's statistics; a step that declares
    ``across_samples``; a ``batch_transform``.
    """
    if not task.primary or task.test_only:
        return
    processes = task.backend.world_size
    reasons: list[str] = []
    most = 1
    for loader, (_, facts) in zip(task.stages.loaders, task.stages.steps, strict=True):
        if loader is None:
            continue
        pieces = _pieces(loader)
        found = [
            *_of_norms(task, pieces, processes),
            *_of_step(facts.across_samples, facts.name, pieces * processes),
            *_of_transform(loader, pieces * processes),
        ]
        if found:
            most = max(most, pieces * processes)
        reasons += [reason for reason in found if reason not in reasons]
    if reasons:
        log.warning(
            "a batch is cut into %d pieces, and %s: that is another update than the whole batch "
            "would make, and depends on micro_batch_size and the number of processes",
            most,
            "; ".join(reasons),
            extra=ALIKE,
        )


def _pieces(loader: AnyLoader) -> int:
    """Micro-batches of one process, at most."""
    return max(len(plan.window(0).pieces) for plan in loader.plans.values())


def _of_norms(task: Task, pieces: int, processes: int) -> Iterator[str]:
    """Batch norms in training mode; those that are synchronised see all processes' samples."""
    names = [
        name or "the model"
        for name, module in task.bare_model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and (module.training or module.running_mean is None)
        and pieces * (1 if isinstance(module, nn.SyncBatchNorm) else processes) > 1
    ]
    if names:
        norms = counted(len(names), "batch norm")
        shown = names[0] if len(names) == 1 else f"such as {names[0]}"
        yield f"the statistics of {norms} ({shown}) are those of one piece"


def _of_step(across_samples: bool, name: str, pieces: int) -> Iterator[str]:
    if across_samples and pieces > 1:
        yield f"train step {name!r} has a loss across samples"


def _of_transform(loader: AnyLoader, pieces: int) -> Iterator[str]:
    if loader.transforms and pieces > 1:
        yield f"{loader.key}.batch_transform mixes the samples of one piece"
