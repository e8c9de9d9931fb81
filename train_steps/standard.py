"""Train step ``standard``: one forward, one loss, one backward."""

from phaseloop.engine.registry import register_train_step
from phaseloop.engine.step_views import check_one_view
from phaseloop.engine.task import Task


@register_train_step("standard", whole_model_forward=True, check=check_one_view)
def standard_train_step(task: Task) -> None:
    """Forward, loss and meters; in a train phase also backward and, the window full, the update."""
    batch = task.next_batch()
    output = task.forward(batch.input)
    loss = task.criterion(output, batch.target)
    if task.train:
        task.backward(loss)
        task.update()
