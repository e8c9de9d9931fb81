"""Hook ``row_sync``: at a log point, what was recorded is averaged over processes."""

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("row_sync", default=True)
class RowSync(Hook):
    """Just before the hooks that log: the row that they see is that of the whole batch.

    With several processes only. Without it, each logs what it has recorded itself.
    """

    order = Order.SYNC_ROWS
    only_watches = True
    for_processes = True

    def on_step(self, task: Task) -> None:
        if task.recorder.due and task.train:
            task.recorder.share(task.backend)
