"""Train step ``tbptt``: backpropagation through time, truncated to pieces of the sequences."""

from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.proof import meet_in_forward
from phaseloop.engine.registry import register_train_step
from phaseloop.engine.step_sets import sets_of
from phaseloop.engine.step_views import check_one_view
from phaseloop.engine.task import Task
from phaseloop.engine.trees import map_tensors


@register_train_step("tbptt", takes="window", one_piece=True)
class TruncatedBackpropagation:
    """Cuts the batch's sequences into pieces and makes an optimizer step after each.

    The model is called as ``model(input, state)`` and gives ``(output, state)``, where the state
    is any tree of tensors, None at a sequence's start; the loss is a mean over time steps. No
    gradient reaches back over a piece's beginning (Williams, Peng, "An efficient gradient-based
    algorithm for on-line training of recurrent network trajectories", 1990, with k1 = k2 =
    ``length``). A batch is one update, however many pieces it makes.

    Args:
        length: time steps of a piece; the last may be shorter.
        time_dim: the dimension of time in input and target.
        stateful: the state at a batch's end is that of the next one's start, for batches that go
            on with each other's sequences; they must then be of one size. A dataset that reads
            several sequences side by side may say how many as its attribute ``lanes``, which
            ``batch_size`` is then compared with.

    Raises:
        ConfigError: length is less than 1.
    """

    def __init__(self, length: int, time_dim: int = 1, stateful: bool = False) -> None:
        if length < 1:
            raise ConfigError("train_step.length", f"{length} is less than 1")
        self.length = length
        self.time_dim = time_dim
        self.stateful = stateful

    def check(self, task: Task) -> None:
        """Raises ConfigError for views, and where batches cannot go on with each other."""
        check_one_view(task, self)
        for key, data in sets_of(task, self).items() if self.stateful else ():
            if not key.startswith("data.test") and data.shuffled:
                raise ConfigError(
                    "train_step.stateful",
                    f"a batch goes on where the one before it ended, and shuffled ones do not: set "
                    f"{key}.shuffle=false",
                )
            if data.limit is not None:
                raise ConfigError(
                    f"{key}.limit",
                    f"{data.limit} leaves out samples here and there, and with "
                    f"train_step.stateful a batch goes on where the one before it ended",
                )
            lanes = getattr(data.first, "lanes", None)
            if lanes is not None and data.batch_size != lanes:
                raise ConfigError(
                    f"{key}.batch_size",
                    f"{data.batch_size} is not {lanes}, the lanes of the dataset: with "
                    f"train_step.stateful a batch has one sample of each",
                )

    def __call__(self, task: Task) -> None:
        for batch in task.window():
            state = task.carry if self.stateful else None
            pieces = [*self._pieces(batch.input, batch.target)]
            if task.agreement is not None and (task.train or meet_in_forward(task)):
                self._check_lengths(task, sum(input.shape[self.time_dim] for input, _ in pieces))
            for input, target in pieces:
                output, state = task.forward(input, state)
                steps = input.shape[self.time_dim]  # the logged mean is over all time steps
                loss = task.criterion(output, target, weight=batch.weight * steps)
                state = detached(state)
                if task.train:
                    task.backward(loss)
                    task.update()
            if self.stateful:
                task.carry = state

    def _check_lengths(self, task: Task, steps: int) -> None:
        """Raises DataError where processes would not make as many steps as each other."""
        if not task.backend.same(steps):
            found = task.backend.all_gather_object(steps)
            raise DataError(
                f"the processes' parts of a batch differ in time steps, {found} by rank: of "
                f"several processes, let the dataset or the collate function make all sequences "
                f"equally long"
            )

    def _pieces(self, input: Any, target: Any) -> Any:
        for part in (input, target):
            if not isinstance(part, Tensor) or part.dim() <= self.time_dim:
                raise ConfigError(
                    "train_step.time_dim",
                    f"input and target must be tensors with a dimension {self.time_dim} of time; "
                    f"one is {getattr(part, 'shape', type(part).__name__)}",
                )
        steps = {part.shape[self.time_dim] for part in (input, target)}
        if len(steps) > 1:
            raise ConfigError(
                "train_step.time_dim", f"input and target differ in time steps: {sorted(steps)}"
            )
        cut = (torch.split(part, self.length, self.time_dim) for part in (input, target))
        return zip(*cut, strict=True)


def detached(tree: Any) -> Any:
    """``tree`` with every tensor without its graph, whatever it is nested in.

    A value that is no tensor and no container, and has a ``detach`` method, is detached by it.
    """

    def detach_other(value: Any) -> Any:
        return value.detach() if callable(getattr(value, "detach", None)) else value

    return map_tensors(Tensor.detach, tree, detach_other)
