"""Where the streams of a training stand, for a checkpoint; other data is found by its position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phaseloop.engine.errors import ConfigError

if TYPE_CHECKING:
    from phaseloop.engine.data.loaders import AnyLoader
    from phaseloop.engine.task import Task


def own_loaders(task: Task) -> dict[str, Any]:
    """Of this process, by the stream's place in the configuration; empty without streams."""
    streams = _streams(task)
    if not streams:
        return {}
    at_hand, progress = task.stages.loaders[task.progress.stage], task.progress
    own = {}
    for key, loader in streams.items():
        here = loader is at_hand
        place = (progress.epoch, progress.windows) if here else (0, 0)
        own[key] = loader.state_dict(*place)
    return own


def restore_loaders(task: Task, states: list[dict[str, Any]]) -> None:
    """Put the streams of this process where :func:`own_loaders` found them.

    Raises:
        ConfigError: they were read by another number of processes or workers.
    """
    streams = _streams(task)
    if not streams or task.test_only:
        return
    processes = task.backend.world_size
    if len(states) != processes:
        raise ConfigError(
            "backend.processes",
            f"{processes} now and {len(states)} in the checkpoint: each process reads a stream "
            f"for itself, so a run keeps their number",
        )
    for key, loader in streams.items():
        if key in states[task.backend.rank]:
            loader.load_state_dict(states[task.backend.rank][key])


def _streams(task: Task) -> dict[str, AnyLoader]:
    return {
        loader.key: loader
        for loader in task.stages.loaders
        if loader is not None and loader.is_stream
    }
