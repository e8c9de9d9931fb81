"""Step sets: what is read in the stages of a step, and what it asks of the model there.

A step's ``check`` goes by these: what other stages do with other steps is none of its business.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from phaseloop.engine.assembly import all_data
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import ConfigError

if TYPE_CHECKING:
    from phaseloop.engine.stages import Stage
    from phaseloop.engine.step_facts import Step
    from phaseloop.engine.task import Task


def numbers_of(task: Task, step: Step) -> list[int]:
    """The stages with this step, by number."""
    return [number for number, (one, _) in enumerate(task.stages.steps) if one is step]


def sets_of(task: Task, step: Step) -> dict[str, Data]:
    """What is read in stages with this step, by its place in the configuration."""
    tests = [task.test_data[name] for name in test_sets_of(task, step)]
    read = [*(task.stages.data(stage) for stage in _stages(task, step)), *tests]
    return {key: data for key, data in all_data(task).items() if any(data is one for one in read)}


def test_sets_of(task: Task, step: Step) -> list[str]:
    """Names of the test sets that stages with this step have."""
    own: set[str] = set()
    for stage in _stages(task, step):
        own.update(task.test_data if stage.test_sets is None else stage.test_sets)
    return [name for name in task.test_data if name in own]


def check_takes_output(task: Task, step: Step, key: str, hint: str) -> None:
    """Raises ConfigError where a test calls ``model(input, output=...)`` and the model cannot.

    Args:
        key: what is to be changed.
        hint: the end of the message.
    """
    takes = inspect.signature(task.bare_model.forward).parameters
    any_keyword = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    if test_sets_of(task, step) and "output" not in takes and not any_keyword:
        name = type(task.bare_model).__name__
        raise ConfigError(key, f"{name}.forward takes no argument 'output'{hint}")


def _stages(task: Task, step: Step) -> list[Stage]:
    return [task.stages.given[number] for number in numbers_of(task, step)]
