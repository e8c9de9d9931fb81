"""Hook ``learning_rate``: sets every scheduled option for the update about to be made."""

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("learning_rate", default=True)
class LearningRate(Hook):
    """At ``on_gradients`` of update k of N the schedules are asked for where = (k - 1) / N.

    With several optimizers each counts the updates that moved it.

    What is logged is what that update used: ``lr``, or ``lr/0``, ``lr/1`` ... by group (a group's
    ``name`` where it has one), after the optimizer's name where there are several.
    """

    order = Order.LEARNING_RATE

    def on_gradients(self, task: Task) -> None:
        moved, epochs = task.progress.moved, task.progress.epoch - 1
        for name in task.stepping:
            task.rates[name].set(moved.get(name, 0), epochs)

    def on_step(self, task: Task) -> None:
        # Looked up only where a row is due: between log points this hook costs one comparison.
        if task.recorder.due and task.updated:
            for name, rates in task.rates.items():
                prefix = f"{name}/" if len(task.rates) > 1 else ""
                groups = rates.optimizer.param_groups
                for number, group in enumerate(groups):
                    label = f"/{group.get('name', number)}" if len(groups) > 1 else ""
                    task.recorder.gauge(f"{prefix}lr{label}", float(group["lr"]))
