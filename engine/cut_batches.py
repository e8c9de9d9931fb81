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

    Batch norms that are trained with their batch's statistics, synchronised ones also where a
    process may be left without a sample, and takes another's in its place; a step that declares
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
            *_of_norms(task, loader, processes),
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


def _of_norms(task: Task, loader: AnyLoader, processes: int) -> Iterator[str]:
    """Batch norms in training mode; those that are synchronised see all processes' samples."""
    pieces = _pieces(loader)
    apart = [name for name, synced in _norms(task) if pieces * (1 if synced else processes) > 1]
    if apart:
        yield f"the statistics of {_named(apart)} are those of one piece"
    synced = [name for name, synced in _norms(task) if synced]
    if synced and pieces == 1 and _smallest(loader) < processes:
        yield (
            f"the statistics of {_named(synced)} have a sample several times where a batch has "
            f"fewer samples than there are processes"
        )


def _norms(task: Task) -> Iterator[tuple[str, bool]]:
    """Names of batch norms that take their batch's statistics; and whether over processes."""
    for name, module in task.bare_model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None
        ):
            yield name or "the model", isinstance(module, nn.SyncBatchNorm)


def _named(names: list[str]) -> str:
    shown = names[0] if len(names) == 1 else f"such as {names[0]}"
    return f"{counted(len(names), 'batch norm')} ({shown})"


def _smallest(loader: AnyLoader) -> int:
    """Samples of the smallest batch, at least; what a process has of a stream is not known."""
    return min(plan.smallest for plan in loader.plans.values())


def _of_step(across_samples: bool, name: str, pieces: int) -> Iterator[str]:
    if across_samples and pieces > 1:
        yield f"train step {name!r} has a loss across samples"


def _of_transform(loader: AnyLoader, pieces: int) -> Iterator[str]:
    if loader.transforms and pieces > 1:
        yield f"{loader.key}.batch_transform mixes the samples of one piece"
