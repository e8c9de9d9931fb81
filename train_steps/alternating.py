"""Train step ``alternating``: several optimizers take turns on a batch, each with its own loss."""

from collections.abc import Sequence

from torch import Tensor

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.registry import register_train_step
from phaseloop.engine.stepping import loss_of
from phaseloop.engine.task import Task


@register_train_step("alternating", takes="window")
class Alternating:
    """Goes through the window once for each optimizer that is due, and moves that one.

    The criterion has a method for each optimizer, of the optimizer's name, which is called with
    (bare model, batch) in the configured precision and gives that optimizer's mean loss, or a
    mapping of named parts. While it runs, parameters of the other optimizers need no gradient.
    Losses are logged as ``loss/NAME``.

    In a test phase every loss is measured; the meters get (output, target) from the criterion's
    method ``test(model, batch)``, where it has one.

    Args:
        order: names of optimizers, in turn; None: as the task has them.
    """

    def __init__(self, order: Sequence[str] | None = None) -> None:
        self.order = None if order is None else list(order)

    def check(self, task: Task) -> None:
        """Raises ConfigError for a name without an optimizer, or without a loss."""
        for name in self._names(task):
            if name not in task.optimizers:
                raise ConfigError(
                    "train_step.order",
                    f"no optimizer is called {name!r}.{nearest(name, task.optimizers)} "
                    f"There are: {listing(task.optimizers)}",
                )
            if not callable(getattr(task.criterion_module, name, None)):
                raise ConfigError(
                    "criterion",
                    f"{type(task.criterion_module).__name__} has no method {name!r}: the step "
                    f"alternating asks it for each optimizer's loss, as {name}(model, batch)",
                )

    def __call__(self, task: Task) -> None:
        if not task.train:
            self._test(task)
            return
        for name in self._names(task):
            if not task.due(name):
                continue
            with task.only(name):
                for batch in task.window():
                    task.backward(self._loss(task, name, batch))
                task.update()

    def _test(self, task: Task) -> None:
        test = getattr(task.criterion_module, "test", None)
        for batch in task.window():
            for name in self._names(task):
                self._loss(task, name, batch)
            if test is not None:
                task.meters.update(None, 0, *task.compute(test, task.bare_model, batch))

    def _loss(self, task: Task, name: str, batch: Batch) -> Tensor:
        method = getattr(task.criterion_module, name)
        loss, parts = loss_of(task.compute(method, task.bare_model, batch))
        named = {f"{name}/{part}": value for part, value in parts.items() if part != "loss"}
        task.measure_parts({**named, name: loss})
        return loss

    def _names(self, task: Task) -> list[str]:
        return self.order or list(task.optimizers)
