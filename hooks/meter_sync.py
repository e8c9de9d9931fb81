"""Hook ``meter_sync``: at a phase's end, meters are added up over processes and read."""

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("meter_sync", default=True)
class MeterSync(Hook):
    """First of all at ``on_phase_end``: every other hook sees metrics that all ranks agree on."""

    order = Order.SYNC_METERS

    def on_phase_end(self, task: Task) -> None:
        task.compute_metrics()
