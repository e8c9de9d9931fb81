"""Hook ``model_summary``: a table of the model's parameters and FLOPs at the start."""

import logging

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.model_summary import summarize_task
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@register_hook("model_summary")
class ModelSummary(Hook):
    """By module: parameters, trainable ones, and FLOPs per sample as fvcore counts them.

    The first sample of the data is the input. A model that cannot be traced is listed without
    FLOPs, with the reason.

    Args:
        depth: levels of modules below the model.

    Raises:
        ConfigError: depth is negative.
    """

    only_watches = True

    def __init__(self, depth: int = 2) -> None:
        if depth < 0:
            raise ConfigError("hooks.model_summary.depth", f"{depth} is negative")
        self.depth = depth

    def on_start(self, task: Task) -> None:
        if task.primary:
            for line in summarize_task(task, self.depth).lines():
                log.info("%s", line)
