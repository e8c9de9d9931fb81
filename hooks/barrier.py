"""Hook ``barrier``: at a phase's end, all processes wait for the slowest."""

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("barrier", default=True)
class Barrier(Hook):
    """Second at ``on_phase_end``: what follows, files above all, finds every rank here."""

    order = Order.BARRIER
    only_watches = True

    def on_phase_end(self, task: Task) -> None:
        task.backend.barrier()
