"""Hook ``garbage``: Python collects cycles at fixed updates and not in the middle of any step."""

import gc

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome


@register_hook("garbage")
class Garbage(Hook):
    """Switches the automatic collection off while the run lasts, and collects at fixed points.

    With several processes they would otherwise pause at different steps, and each would wait for
    all. What belongs to no cycle is freed at once in any case.

    Args:
        every_updates: collect after every n-th update.

    Raises:
        ConfigError: n is less than 1.
    """

    only_watches = True

    def __init__(self, every_updates: int = 1000) -> None:
        if every_updates < 1:
            raise ConfigError("hooks.garbage.every_updates", f"{every_updates} is less than 1")
        self.every_updates = every_updates
        self._switched_off = False

    def on_start(self, task: Task) -> None:
        self._switched_off = gc.isenabled()
        gc.disable()
        gc.collect()  # what building the task has left

    def on_step(self, task: Task) -> None:
        if task.updated and task.progress.updates % self.every_updates == 0:
            gc.collect()

    def on_end(self, task: Task, outcome: Outcome) -> None:
        if self._switched_off:
            self._switched_off = False
            gc.enable()
