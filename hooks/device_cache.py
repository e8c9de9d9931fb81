"""Hook ``device_cache``: gives memory that torch holds in reserve back to the GPU."""

import logging

from phaseloop.engine.device_kinds import Kind, kind_of
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@register_hook("device_cache")
class DeviceCache(Hook):
    """Has torch give back what its allocator holds for a GPU or TPU, at fixed updates.

    It frees no memory that is in use, and torch has to ask for it again: good against
    fragmentation, or where another program shares the GPU. On the CPU there is nothing to clear.

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
        self._kind: Kind | None = None

    def on_start(self, task: Task) -> None:
        kind = kind_of(task.device)
        self._kind = kind if kind.caches else None
        if self._kind is None:
            log.info("hooks.%s: nothing is cached on %s; it does nothing", self.name, task.device)

    def on_step(self, task: Task) -> None:
        if self._kind is None or not task.updated:
            return
        if task.progress.updates % self.every_updates == 0:
            self._kind.free_memory()
