"""Step views: a step is given as many views of a sample as it works on, or says so at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.step_sets import numbers_of

if TYPE_CHECKING:
    from phaseloop.engine.data.source import Data
    from phaseloop.engine.task import Task


def check_one_view(task: Task, step: Any) -> None:
    """Raises ConfigError where a stage with this step has batches of several views."""
    for name, key, data in _trained_by(task, step):
        if data.views > 1:
            raise ConfigError(
                f"{key}.views",
                f"{data.views} makes as many inputs of each batch, and the step {name} calls the "
                f"model with one; leave it out, or choose a step that compares views",
            )


def check_two_views(task: Task, step: Any) -> None:
    """Raises ConfigError where a stage with this step has batches of one view, or of many.

    One view, not augmented, may be a pair that the dataset gives: its batches will show.
    """
    for name, key, data in _trained_by(task, step):
        pairs = data.views == 1 and data.augment is None
        if data.views != 2 and not pairs:
            raise ConfigError(
                f"{key}.views",
                f"it is {data.views}, and the step {name} compares two views of each sample; set "
                f"it to 2",
            )


def _trained_by(task: Task, step: Any) -> Iterator[tuple[str, str, Data]]:
    """Name of the step, key and training data of each stage with it."""
    stages = task.stages
    for number in numbers_of(task, step):
        loader, data = stages.loaders[number], stages.data(stages.given[number])
        if loader is not None and data is not None:
            yield stages.steps[number][1].name, loader.key, data
