"""A rehearsal: the first micro-batch goes through the train step, on the side, up to its backward.

What autograd keeps by then is counted: the activations that a backward needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phaseloop.engine import rng
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.events import Dispatcher
from phaseloop.engine.model_options import channels_last
from phaseloop.engine.model_summary import twin
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.shards import is_shard
from phaseloop.engine.stepping import Stepping
from phaseloop.engine.task import Task


@dataclass(frozen=True)
class Rehearsal:
    """What one micro-batch needs.

    Attributes:
        samples: of the micro-batch.
        batch: bytes of its tensors.
        kept: bytes that are kept for backward, without what is kept anyway: parameters, buffers
            and the batch.
        problem: why nothing of this is known; empty: it is.
    """

    samples: int = 0
    batch: int = 0
    kept: int = 0
    problem: str = ""


def rehearse(task: Task, largest: int) -> Rehearsal:
    """Read the first micro-batch of the training and go through the train step with it.

    Nothing of the training notices: it is done in a copy that shares the parameters, and the
    generators of this process and its device are put back.

    Args:
        task: after ``build()``.
        largest: samples of a micro-batch.
    """
    if problem := _problem(task):
        return Rehearsal(problem=problem)
    host, device = rng.HostGenerators(), task.backend.rng_state()
    try:
        batch = _first_batch(task.loaders[TRAIN], largest)
        return _measured(task, batch)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return Rehearsal(problem=f"{type(error).__name__}: {first}")
    finally:
        host.put_back()
        task.backend.set_rng_state(device)


def _problem(task: Task) -> str:
    facts = task.step_facts
    if TRAIN not in task.loaders or not task.optimizers:
        return "nothing is trained"
    if not isinstance(task.loaders[TRAIN], Loader):
        return "a stream is read by the training alone"
    if task.backend.lazy:
        return "what such a device keeps shows when it runs"
    if any(map(is_shard, task.bare_model.parameters())):
        return "the parameters are sharded"
    if facts.takes_window or not facts.whole_model_forward:
        return f"the step {facts.name} goes through the model in a way of its own"
    return ""


def _first_batch(loader: Any, largest: int) -> Batch:
    reader = loader.beside()
    reader.cut_smaller(largest)
    plans = reader.plans
    epoch = max(plans, key=lambda first: plans[first].batch_size)
    _, batch = next(reader.batches(epoch, 0, 0))
    if batch is None:
        raise ValueError("the collate function gave None for the first micro-batch")
    made: Batch = batch
    return made


def _measured(task: Task, batch: Batch) -> Rehearsal:
    stand_in = _StandIn(task, batch)
    anyway = [*stand_in.tensors(), *_tensors(stand_in.batch.data)]
    known = {_key(tensor) for tensor in anyway}
    with torch.enable_grad(), _counting() as kept:
        try:
            task.stages.steps[0][0](stand_in)
        except _ReachedBackward:
            pass
        else:
            raise ValueError(f"the step {task.step_facts.name} did not call task.backward()")
    sizes = {_key(each.tensor): each.tensor.untyped_storage().nbytes() for each in kept}
    new = sum(size for key, size in sizes.items() if key not in known)
    own = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(batch.data)}
    return Rehearsal(batch.size, sum(own.values()), new)


class _Kept:
    """What autograd holds in place of a tensor: gone when its graph is, thrown away on the way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _counting() -> Iterator[WeakSet[_Kept]]:
    """The tensors that autograd keeps within, of the graphs that are still there."""
    kept: WeakSet[_Kept] = WeakSet()

    def pack(tensor: Tensor) -> _Kept:
        held = _Kept(tensor.detach())  # a result would hold on to its own graph; autograd knows it
        if not is_shard(tensor):
            kept.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        yield kept


def _key(tensor: Tensor) -> tuple[str, int]:
    """Tensors that share memory have one."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _tensors(data: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor)]


class _ReachedBackward(Exception):  # noqa: N818 nothing is wrong
    """The loss is there: from here on only less is kept."""


class _StandIn:
    """What the step takes for its task: it gives one batch and ends the step at its backward."""

    forward = Stepping.forward
    compute = Stepping.compute
    criterion = Stepping.criterion

    def __init__(self, task: Task, batch: Batch) -> None:
        self._task = task
        self.hooks = Dispatcher({})
        self.train = True
        self.model = self.bare_model = twin(task.bare_model)
        given = task.criterion_module
        self.criterion_module = twin(given) if isinstance(given, nn.Module) else given
        self.batch = batch.with_data(task.precision.cast_input(batch.data))
        if task.model_options.channels_last:
            self.batch.input = channels_last(self.batch.input)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers of what it computes with."""
        for module in (self.model, self.criterion_module):
            if isinstance(module, nn.Module):
                yield from module.parameters()
                yield from module.buffers()

    def next_batch(self) -> Batch:
        return self.batch

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        self.reached = loss  # so that its graph is there to be counted
        raise _ReachedBackward

    def update(self, closure: Any = None) -> None: ...

    def measure(self, *args: Any, **kwargs: Any) -> None: ...

    def measure_parts(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any, **kwargs: Any) -> None: ...

    def record_image(self, *args: Any, **kwargs: Any) -> None: ...
