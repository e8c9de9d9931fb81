"""Hook ``device_cache``: gives memory that torch holds in reserve back to the GPU."""

import logging

import torch

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@register_hook("device_cache")
class DeviceCache(Hook):
    """Calls ``torch.cuda.empty_cache()`` at fixed updates; on the CPU there is nothing to clear.

    It frees no memory that is in use, and torch has to ask for it again: good against
    fragmentation, or where another program shares the GPU.

    Args:
        every_updates: clear after every n-th update.

    Raises:
        ConfigError: n is less than 1.
    """

    only_watches = True

    def __init__(self, every_updates: int = 100) -> None:
        if every_updates < 1:
            raise ConfigError("hooks.device_cache.every_updates", f"{every_updates} is less than 1")
        self.every_updates = every_updates
        self._clears = False

    def on_start(self, task: Task) -> None:
        self._clears = task.device.type == "cuda"
        if not self._clears:
            log.info("hooks.%s: nothing is cached on %s; it does nothing", self.name, task.device)

    def on_step(self, task: Task) -> None:
        if self._clears and task.updated and task.progress.updates % self.every_updates == 0:
            torch.cuda.empty_cache()
