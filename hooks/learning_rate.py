"""Hook ``learning_rate``: sets every scheduled option for the update about to be made."""

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("learning_rate", default=True)
class LearningRate(Hook):
    """At ``on_gradients`` of update k of N the schedules are asked for where = (k - 1) / N.

    With several optimizers each counts the updates that moved it.

    What is logged is what that update used: ``lr``, or ``lr/0``, ``lr/1`` ... by group (a group's
    ``name`` where it has one), after the optimizer's name where there are several; and every other
    scheduled option likewise, such as ``momentum`` and ``weight_decay``. Until the next update
    asks, the groups keep what the last one used.
    """

    order = Order.LEARNING_RATE
    alike = True

    def on_start(self, task: Task) -> None:
        for rates in task.rates.values():
            rates.check_metric(task)

    def on_gradients(self, task: Task) -> None:
        epochs = task.plan.epoch(task.progress) - 1
        for name in task.stepping:
            task.rates[name].set(task.progress.moves_in_stage(name), epochs)

    def on_step(self, task: Task) -> None:
        # Looked up only where a row is due: between log points this hook costs one comparison.
        if task.recorder.due and task.updated:
            for name, rates in task.rates.items():
                prefix = f"{name}/" if len(task.rates) > 1 else ""
                groups = rates.optimizer.param_groups
                for option in rates.options:
                    for number, value in rates.values(option):
                        label = f"/{groups[number].get('name', number)}" if len(groups) > 1 else ""
                        task.recorder.gauge(f"{prefix}{option}{label}", value)

    def on_phase_end(self, task: Task) -> None:
        for rates in task.rates.values():
            rates.observe(task)

    def on_loop_end(self, task: Task) -> None:
        progress = task.progress
        if not task.over:  # stopped: the next update moves what has to be moved
            return
        # The epoch of a run that ends within it may be continued by a longer one.
        within = progress.epoch_open or task.plan.epoch_is_unfinished(progress)
        for name, rates in task.rates.items():
            rates.finish(progress.moves_in_stage(name), task.plan.epoch(progress) - within)
