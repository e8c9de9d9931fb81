"""Hook ``precise_bn``: batch-norm statistics of the weights that are tested, measured anew."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.proof import meet_in_forward
from phaseloop.engine.registry import register_hook
from phaseloop.engine.swapping import Place, places
from phaseloop.engine.task import Task


@register_hook("precise_bn")
class PreciseBN(Hook):
    """Before a test phase, runs training data through the model that is tested.

    The running averages that batch norms keep in training are of weights that have changed since,
    and never of averaged weights. Here mean and variance of each layer are measured over the same
    fixed weights: over all samples of the batches, by ``fvcore.nn.precise_bn`` (Wu and Johnson,
    "Rethinking Batch in BatchNorm", 2021, section 3).

    The model is in evaluation mode but for the batch norms that are trained, and is called with
    ``batch.input``. The data is that of the epoch at hand from its first batch on, read in this
    process, with its own augmentation. After the test the raw statistics are back, and they are
    what a checkpoint holds: the training is the same with this hook or without.

    Several processes measure over their shares of the same batches, and put together what they
    found: as one process has it for a first batch norm. What comes behind one sees what that made
    of a micro-batch, and so depends on its size.

    Args:
        batches: micro-batches of training data to measure over, on each process.
        every_epochs: at the tests of every n-th epoch, and after the last update.

    Raises:
        ConfigError: a number is less than 1.
    """

    order = Order.AVERAGE + 1  # the weights that are tested are in the model
    shapes_tests = True
    reads_training_data = True

    def __init__(self, batches: int = 200, every_epochs: int = 1) -> None:
        for name, value in {"batches": batches, "every_epochs": every_epochs}.items():
            if value < 1:
                raise ConfigError(f"hooks.precise_bn.{name}", f"{value} is less than 1")
        self.batches = batches
        self.every_epochs = every_epochs
        self._statistics: dict[str, Tensor] = {}
        self._measured_at: tuple[int, int] | None = None

    def on_start(self, task: Task) -> None:
        self._measured_at = None
        if all(loader is None for loader in task.stages.loaders):
            raise ConfigError(f"hooks.{self.name}", "it needs training data, and there is none")
        for loader in filter(None, task.stages.loaders):
            if loader.views > 1:
                raise ConfigError(
                    f"hooks.{self.name}",
                    f"it calls the model with one input, and {loader.key}.views is {loader.views}",
                )
        if not any(_has_statistics(module) for module in task.bare_model.modules()):
            raise ConfigError(f"hooks.{self.name}", "the model has no batch norm with statistics")

    def on_phase_start(self, task: Task) -> None:
        if task.train or not self._due(task):
            return
        now = (task.progress.updates, task.progress.roll_backs)
        if now != self._measured_at:  # else another test set of the same weights
            try:
                self._statistics = self._measure(task)
            except _StoppedError:
                return  # and the phase that begins is left at once
            self._measured_at = now
        task.swapping.put_in(self._statistics)

    def _due(self, task: Task) -> bool:
        progress = task.progress
        by_epoch = progress.epoch % self.every_epochs == 0
        return by_epoch or task.test_only or task.plan.train_is_over(progress)

    def _measure(self, task: Task) -> dict[str, Tensor]:
        """The statistics of all batch norms that are trained, by name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fvcore.nn.precise_bn import update_bn_stats  # late: it is slow to import

        resting = {id(module) for module in task.evaluating()}
        loader = task.stages.loaders[task.progress.stage]
        norms = [
            module
            for module in task.bare_model.modules()
            if _has_statistics(module) and id(module) not in resting
        ]
        if not norms or loader is None:  # a stage that only tests
            return {}
        ids = {id(norm) for norm in norms}
        buffers = {
            name: place
            for name, place in places(task.bare_model).items()
            if place.buffer and id(place.owner) in ids
        }
        task.swapping.keep(buffers)
        before = [_Settings(norm) for norm in norms]
        counts = [_Count(norm) for norm in norms]
        try:
            for norm in norms:
                norm.training = True
            inputs = self._inputs(task, loader.beside())
            stopped = False
            try:
                update_bn_stats(_Forward(task, norms), inputs, self.batches)
            except _StoppedError:
                stopped = True
            if stopped if task.agreement is None else task.agreement.total(stopped):
                raise _StoppedError
            if task.agreement is not None:
                _put_together(task, counts)
            return _statistics_in(buffers)
        finally:
            for settings in before:
                settings.put_back()

    def _inputs(self, task: Task, loader: AnyLoader) -> Iterator[Any]:
        """Inputs of training data, epoch after epoch.

        As many on all processes: one that has no part in a batch gives a :class:`_StandIn`.
        """
        # Who left alone would be waited for in the others' next forward.
        together = task.agreement if meet_in_forward(task) else None
        epoch = max(1, task.progress.epoch)
        while True:
            given = 0
            for _, batch in loader.batches(epoch, task.progress.roll_backs, 0):
                stopped = task.signals.received is not None
                if stopped if together is None else together.total(stopped):
                    raise _StoppedError
                if batch is None:
                    if task.agreement is not None:
                        raise DataError(f"hooks.{self.name}: {loader.key}: {_NONE_ALONE}")
                    continue
                given += 1
                data = task.precision.cast_input(batch.data)
                input = Batch(data, batch.indices, batch.weight).input
                yield input if batch.weight else _StandIn(input)
            if not given:
                raise DataError(f"hooks.{self.name}: epoch {epoch} has no batch that is not None")
            epoch += 1


_NONE_ALONE = (
    "the collate function gave None; of several processes each has to have its part of a batch: "
    "leave such samples out of the dataset"
)


class _StoppedError(Exception):
    """A signal has come: the test that this was for will not be made."""


class _Forward(nn.Module):
    """The task's model, called as in a forward pass of the task, without its events."""

    def __init__(self, task: Task, norms: list[nn.Module]) -> None:
        super().__init__()
        self.model = task.bare_model
        self._task = task
        self._norms = norms

    def forward(self, *inputs: Any) -> None:
        if not isinstance(inputs[0], _StandIn):
            self._through(*inputs)
        elif meet_in_forward(self._task):
            hooks = [dict(norm._forward_pre_hooks) for norm in self._norms]
            for norm in self._norms:
                norm._forward_pre_hooks.clear()  # nobody counts it, and so it does not count
            try:
                self._through(inputs[0].input)
            finally:
                for norm, own in zip(self._norms, hooks, strict=True):
                    norm._forward_pre_hooks.update(own)

    def _through(self, *inputs: Any) -> None:
        task = self._task
        if task.precision.changes_forward:
            with task.precision.autocast(task.device):
                self.model(*inputs)
        else:
            self.model(*inputs)
        task.backend.mark_step()


class _StandIn(NamedTuple):
    """What a process has where a batch has no sample for it."""

    input: Any


class _Count:
    """How many values of each channel a batch norm has measured."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm: Any = norm
        self.values = 0
        norm.register_forward_pre_hook(self._add)  # removed with the library's own

    def _add(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.values += inputs[0].numel() // inputs[0].shape[1]


def _put_together(task: Task, counts: list[_Count]) -> None:
    """Mean and variance over the values of all processes, in one message of float64."""
    parts = []
    for count in counts:
        mean, variance = count.norm.running_mean.double(), count.norm.running_var.double()
        number = mean.new_tensor([float(count.values)])
        parts += [number, number * mean, number * (variance + mean.square())]
    total = task.backend.all_reduce(torch.cat(parts))
    sums = iter(torch.split(total, [len(part) for part in parts]))
    for count in counts:
        number = next(sums).clamp(min=1)  # a norm that nobody went through has nothing
        mean, square = next(sums) / number, next(sums) / number
        norm = count.norm
        norm.running_mean = mean.to(norm.running_mean.dtype)
        norm.running_var = (square - mean.square()).to(norm.running_var.dtype)


class _Settings:
    """What measuring changes of a batch norm beside values, as it was."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm: Any = norm
        self._training = norm.training
        self._momentum = self._norm.momentum
        self._buffers = dict(norm._buffers)
        self._hooks = dict(norm._forward_pre_hooks)

    def put_back(self) -> None:
        norm = self._norm
        norm.training = self._training
        norm.momentum = self._momentum
        norm._buffers.update(self._buffers)  # fvcore puts new tensors there
        for key in set(norm._forward_pre_hooks) - set(self._hooks):
            del norm._forward_pre_hooks[key]  # and leaves its own behind when an error comes


def _has_statistics(module: nn.Module) -> bool:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # those of fvcore
    return isinstance(module, kinds) and module.running_mean is not None


def _statistics_in(buffers: dict[str, Place]) -> dict[str, Tensor]:
    """Mean and variance; the count of batches is of no use to a test."""
    return {
        name: place.tensor.clone()
        for name, place in buffers.items()
        if place.key in ("running_mean", "running_var")
    }
