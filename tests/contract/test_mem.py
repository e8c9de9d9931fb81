"""MEM: nothing with a graph outlives an update, and memory is flat over a long run."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from phaseloop import (
    Accuracy,
    Data,
    Hook,
    Mean,
    Order,
    Phases,
    Run,
    Task,
    TensorData,
    default_hooks,
)
from phaseloop.hooks.average import Average
from tests.rigs import r1
from tests.rigs.equal import newest
from tests.rigs.probes import watch
from tests.rigs.r0 import r0, train


class Token:
    """Lives as long as the graph of the forward pass that made it."""


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Marked(nn.Module):
    """A network each of whose graphs holds a token.

    Attributes:
        graphs: one weak reference per forward pass with gradients; dead once the graph is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = r1.network()
        self.graphs: list[weakref.ref[Token]] = []

    def forward(self, x: Tensor) -> Tensor:
        token = Token()
        self.graphs.append(weakref.ref(token))
        return _Mark.apply(self.body(x), token)

    def alive(self) -> int:
        """Graphs that still exist."""
        return sum(graph() is not None for graph in self.graphs)


def plain(task: Task) -> None:
    batch = task.next_batch()
    loss = task.criterion(task.forward(batch.input), batch.target)
    if task.train:
        task.backward(loss)
        task.update()


def with_weight(task: Task) -> None:
    batch = task.next_batch()
    output = task.forward(batch.input)
    loss = task.criterion(output, batch.target)
    if task.train:
        # A weight that itself hangs on the model, as a count of confident outputs would.
        task.backward(loss, weight=output.softmax(1).sum())
        task.update()


def with_records(task: Task) -> None:
    batch = task.next_batch()
    output = task.forward(batch.input)
    parts = {"loss": nn.functional.cross_entropy(output, batch.target), "norm": output.norm()}
    task.measure(parts["loss"], output, batch.target, parts=parts)
    task.record("confidence", output.softmax(1).amax(1).mean())
    if task.train:
        task.backward(parts["loss"])
        task.update()


def at_times_without_backward(task: Task) -> None:
    batch = task.next_batch()
    loss = task.criterion(task.forward(batch.input), batch.target)
    if task.train and task.phase.position % 2:
        task.backward(loss)
        task.update()


def make(step: Callable[[Task], None], folder: Path | None = None, **options: Any) -> Task:
    """R1 with marked graphs and meters of every kind; logs every 7 updates."""

    def meters() -> dict[str, Any]:
        return {
            "accuracy": Accuracy(),
            "theirs": torchmetrics.Accuracy("multiclass", num_classes=2),
            "list": torchmetrics.AUROC("multiclass", num_classes=2),  # keeps every output
        }

    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData(x, (x.sum(1) > 0).long())
    model = Marked()
    settings: dict[str, Any] = {
        "phases": Phases(epochs=2, test_every_updates=4),
        "train": Data(data, 4, micro_batch_size=2),
    }
    return Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=r1.optimizer("sgd", model),
        test=Data(data, 8),
        train_meters=meters(),
        test_meters=meters(),
        train_step=step,
        run=Run(str(folder) if folder else None, log_every=7),
        **{**settings, **options},
    )


class GraphsAlive(Hook):
    """How many graphs are alive at the start of each step, at phase ends and at the run's end."""

    order = Order.CHECKPOINT - 1
    only_watches = True

    def __init__(self) -> None:
        self.counts: list[int] = []

    def look(self, task: Task) -> None:
        assert isinstance(task.bare_model, Marked)
        self.counts.append(task.bare_model.alive())

    def on_phase_start(self, task: Task) -> None:
        self.look(task)

    def on_phase_end(self, task: Task) -> None:
        self.look(task)

    def on_end(self, task: Task, outcome: Any) -> None:
        self.look(task)


@pytest.mark.parametrize("step", [plain, with_weight, with_records, at_times_without_backward])
def test_mem_a_no_graph_outlives_its_step(step: Callable[[Task], None], tmp_path: Path) -> None:
    gc.disable()  # a graph freed only by the collector of cycles has outlived its step
    try:
        alive = GraphsAlive()

        def checked(task: Task) -> None:
            alive.look(task)
            step(task)

        task = make(checked, tmp_path)
        train(task, **default_hooks(alive=alive))
    finally:
        gc.enable()
    assert len(task.bare_model.graphs) > 40
    assert set(alive.counts) == {0}


def test_mem_a_a_loss_kept_by_a_hook_keeps_no_graph() -> None:
    kept = watch("on_step", lambda task: task.loss)
    task = make(plain)
    train(task, kept=kept)
    assert len(kept.seen) > 40
    assert all(loss.grad_fn is None for loss in kept.seen)
    assert task.bare_model.alive() == 0


def test_mem_a_an_error_leaves_no_graph_behind_once_it_is_handled() -> None:
    def fails(task: Task) -> None:
        plain(task)
        if task.progress.updates == 3:
            raise ValueError("in the step")

    task = make(fails)
    with contextlib.suppress(ValueError):
        train(task)
    task.loss = task.output = None
    gc.collect()
    assert task.bare_model.alive() == 0


class Census(Hook):
    """Counts what the collector knows, by type, and tensors by shape, after certain updates.

    Just after a log point, where the recorder is empty, at the same place of an epoch.
    """

    order = Order.CHECKPOINT - 1
    only_watches = True

    def __init__(self, *updates: int) -> None:
        self.updates = updates
        self.counts: list[Counter[Any]] = []

    def on_step(self, task: Task) -> None:
        if task.updated and task.progress.updates in self.updates:
            task.writer.settle()  # what is in flight is there, or not, as the disk was fast
            gc.collect()
            self.counts.append(Counter(map(_kind, gc.get_objects())))


def _kind(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return type(thing).__name__, thing.dtype, tuple(thing.shape)
    return type(thing).__name__


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """The collector forgets what is there already: a census is quick and sees this test only."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class OutputSum(Mean):
    """A second built-in meter."""

    def update(self, output: Tensor, target: Any) -> None:
        super().update(output.sum(1), target)


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("hooks", ["bare", "default", "average"])
def test_mem_a_memory_is_flat_over_1000_updates_and_10_epochs(
    hooks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps every record that it captures.
    monkeypatch.setattr(logging.getLogger("phaseloop"), "propagate", False)
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData(x, (x.sum(1) > 0).long())
    model = r1.network()
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=r1.optimizer("sgd", model),
        train=Data(data, 2),
        test=Data(data, 50),
        train_meters={"accuracy": Accuracy(), "sum": OutputSum()},
        test_meters={"accuracy": Accuracy()},
        phases=Phases(epochs=10, test_every_updates=100),
        run=Run(None if hooks == "bare" else str(tmp_path), log_every=50),
    )
    # The first epochs make what is made once: caches, the optimizer's state, the first test; the
    # first census what a census makes.
    census = Census(200, 300, 1000)
    # TensorBoard's thread has a lock more while it waits: whether it does is a matter of time.
    more = {"average": Average(), "tensorboard": None} if hooks == "average" else {}
    train(task, **({} if hooks == "bare" else default_hooks(**more)), census=census)
    assert task.progress.updates == 1000
    assert task.progress.epoch == 10
    _, early, late = census.counts
    assert (late - early) - Counter(["Counter"]) == Counter()  # the early census itself


def test_mem_a_what_waits_for_a_log_point_is_bounded() -> None:
    """A log cadence longer than the run: values are added up on the device, not heaped."""
    n = 2100
    task = r0(range(n), 1, lr=0.0, w=1.0, run=Run(log_every=10 * n))
    waiting = watch("on_step", lambda task: len(task.recorder._series["loss"].values))
    train(task, waiting=waiting)
    assert max(waiting.seen) < n / 2
    values, weights = task.recorder.state_dict()["series"]["loss"]
    assert sum(weights) == n
    assert float(torch.dot(values, torch.tensor(weights).double())) == sum(range(n))


def test_mem_a_saving_in_the_background_keeps_one_copy_of_the_state(tmp_path: Path) -> None:
    """The buffers are those of the save before, and as large as what is written."""
    seen: list[set[int]] = []
    sizes: list[int] = []

    def look(task: Task) -> None:
        buffers = [buffer for _, buffer in task.writer._snapshot._kept.values()]
        names = {task.bare_model[number].weight.shape for number in (0, 3)}
        seen.append({b.data_ptr() for b in buffers if b.shape in names})
        sizes.append(sum(b.untyped_storage().nbytes() for b in buffers))

    saving = watch("on_phase_end", look, Order.CHECKPOINT)
    type(saving).saves = True  # it does not, but has to come after what does
    r1.train(tmp_path, epochs=6, hooks={"saving": saving})
    assert len(seen) == 6
    # Two weights, and their momentum: the first save makes the buffers, the others use them.
    assert len(seen[0]) == 4
    assert all(pointers == seen[0] for pointers in seen)
    state = newest(tmp_path).manifest["files"]
    assert len(set(sizes)) == 1 and sizes[0] <= sum(file["bytes"] for file in state.values())
