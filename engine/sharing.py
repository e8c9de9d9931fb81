"""Sharing: what processes say to one another about a stream, of which each reads its own share.

Nobody but the process itself knows how much it has, so a pass that ends on one ends for all.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.data.plan import Window
from phaseloop.engine.data.stream import StreamLoader
from phaseloop.engine.errors import ConfigError, DataError, PeerError

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def check_lengths(task: Task, loaders: Iterable[AnyLoader]) -> None:
    """Compare what the processes say of the lengths of their streams.

    Raises:
        ConfigError: a length is not the same on all.
    """
    own = {loader.key: loader.samples for loader in loaders if isinstance(loader, StreamLoader)}
    if not own:
        return
    ranks = task.backend.all_gather_object(own)
    for key in own:
        said = [rank[key] for rank in ranks]
        if len(set(said)) > 1:
            each = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(said))
            raise ConfigError(
                f"{key}.dataset",
                f"the stream has a length that is not the same on all processes ({each}): give "
                f"that of the whole stream, over all processes, or none",
            )


def has_pass(task: Task, loader: AnyLoader, epoch: int) -> bool:
    """There is an epoch of this number for every process: one that has nothing ends it for all.

    Raises:
        DataError: this process has nothing in its first pass.
        PeerError: another has nothing in its first pass.
    """
    own = loader.has_pass(epoch)
    if task.agreement is None or not isinstance(loader, StreamLoader):
        return own
    reasons = task.backend.all_gather_object("" if own else loader.why_empty())
    empty = [rank for rank, reason in enumerate(reasons) if reason]
    if empty and not loader.gave:
        rank = task.backend.rank if task.backend.rank in empty else empty[0]
        message = f"{reasons[rank]}, on rank {rank}"
        raise DataError(message) if rank == task.backend.rank else PeerError(message)
    loader.used_up = bool(empty)
    return not empty


def whole_window(task: Task, window: Window) -> Window:
    """The window with the samples of all processes in it; called when it begins.

    Raises:
        DataError: nobody has any, of a test.
    """
    assert task.agreement is not None
    # Known from the window before, but for the first of a pass and the first in this process.
    samples = task.agreement.left
    if not samples:
        loader = task.loaders[task.phase.name]
        assert isinstance(loader, StreamLoader)
        shares, marks = zip(
            *task.backend.all_gather_object((window.share, loader.mark)), strict=True
        )
        samples = sum(shares)
        if not samples:
            raise DataError(loader.why_empty())
        if task.primary:
            _warn_of_equal(loader.key, marks)
        loader.mark = 0
    return dataclasses.replace(window, samples=samples)


def _warn_of_equal(key: str, marks: tuple[int, ...]) -> None:
    for rank, mark in enumerate(marks):
        if mark and mark in marks[:rank]:
            log.warning(
                "%s.dataset: the first batch of rank %d is that of rank %d. Each process reads a "
                "stream for itself: unless it takes a part of its own, every sample comes %d times "
                "in a pass. Let the dataset have a method set_rank(rank, world_size), which is "
                "called before anything is read",
                key,
                rank,
                marks.index(mark),
                len(marks),
            )
            return


def tell_left_out(task: Task) -> None:
    """A train phase has ended: what is said where it did so for want of samples on one process."""
    assert task.agreement is not None
    loader, progress = task.loaders[task.phase.name], task.progress
    ended = progress.epoch_windows == progress.windows
    if not isinstance(loader, StreamLoader) or not ended or not task.agreement.left:
        return
    ranks = task.backend.gather_object(loader.count_left())
    if not task.primary:
        return
    short = [str(rank) for rank, (samples, _) in enumerate(ranks) if not samples]
    rest = ", ".join(
        f"{'' if all_of_them else 'at least '}{samples} samples of rank {rank}"
        for rank, (samples, all_of_them) in enumerate(ranks)
        if samples
    )
    log.warning(
        "%s: epoch %d ended for all after %d batches, since rank %s had nothing left; left out: %s",
        loader.key,
        progress.epoch,
        progress.windows,
        " and ".join(short),
        rest,
    )
