"""Train step ``closure``: for optimizers that ask for loss and gradients several times a step."""

from torch import Tensor

from phaseloop.engine.registry import register_train_step
from phaseloop.engine.step_views import check_one_view
from phaseloop.engine.task import Task


@register_train_step("closure", takes="window", one_piece=True, check=check_one_view)
def closure_train_step(task: Task) -> None:
    """One update by an optimizer such as LBFGS, which calls the closure as often as it likes.

    The logged loss and the meters are those of the first call, before anything moved. A batch that
    is cut into micro-batches, and losses that are scaled (``float16``), are refused.
    """

    def evaluate() -> Tensor:
        (batch,) = task.window()
        loss = task.criterion(task.forward(batch.input), batch.target)
        if task.train:
            task.backward(loss)
        return loss

    if task.train:
        task.update(evaluate)
    else:
        for batch in task.window():
            task.criterion(task.forward(batch.input), batch.target)
