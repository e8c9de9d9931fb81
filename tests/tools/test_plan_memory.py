"""The memory estimate against tensors that are there: counted after a real update, and by hand."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from phaseloop import Data, Fsdp, Hook, ModelOptions, Phases, Task, TensorData
from phaseloop.engine.lars import LARS
from phaseloop.hooks.average import Average
from phaseloop.tools.planning.memory import Memory, estimate, micro_batch, size
from phaseloop.tools.planning.optimizer_state import state_bytes
from phaseloop.tools.planning.rehearsal import rehearse
from tests.rigs import r0, r1

FLOAT, LONG, HALF = 4, 8, 2
INPUTS, HIDDEN, CLASSES = 4, 8, 2
BATCH = 6


def of(memory: Memory, name: str) -> int:
    return next(part.bytes for part in memory.parts if part.name == name)


def held(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def samples(count: int = 24) -> TensorData:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, INPUTS, generator=generator)
    return TensorData(x, (x.sum(dim=1) > 0).long())


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), *more, nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make(model: nn.Module | None = None, optimizer: Any = optim.Adam, **options: Any) -> Task:
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": lambda model: optimizer(model.parameters(), lr=0.1),
        "train": Data(samples(), BATCH),
        "phases": Phases(updates=1),
    }
    return Task(model=model or mlp(), **{**settings, **options})


def built(*args: Any, **options: Any) -> Task:
    task = make(*args, **options)
    task.build()
    return task


# --- what is held anyway: the tensors of a real update ---

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "momentum": lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9),
    "adam": optim.Adam,
    "amsgrad, fused": lambda p, lr: optim.AdamW(p, lr=lr, amsgrad=True, fused=True),
    "foreach": lambda p, lr: optim.Adam(p, lr=lr, foreach=True),
    "nadam": optim.NAdam,
    "rmsprop": lambda p, lr: optim.RMSprop(p, lr=lr, momentum=0.9, centered=True),
    "adagrad": optim.Adagrad,  # has its state from the beginning
    "asgd": optim.ASGD,  # looks at values
    "adafactor": optim.Adafactor,  # keeps rows and columns
    "lars": LARS,
}


class Gradients(Hook):
    """Notes the bytes of all gradients."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_gradients(self, task: Task) -> None:
        self.bytes = held(p.grad for p in task.trainable if p.grad is not None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_held_anyway_is_what_a_real_update_holds(optimizer: Any) -> None:
    memory = estimate(built(mlp(nn.BatchNorm1d(HIDDEN)), optimizer), {"average": Average()})
    gradients = Gradients()
    task = make(mlp(nn.BatchNorm1d(HIDDEN)), optimizer)
    r0.train(task, average=Average(), gradients=gradients)
    assert task.progress.updates == 1
    assert of(memory, "parameters") == held(task.bare_model.parameters())
    assert of(memory, "buffers") == held(task.bare_model.buffers())
    assert of(memory, "gradients") == gradients.bytes > 0
    assert of(memory, "hook average") == held(task.averages["average"].values())
    state = task.optimizers["optimizer"].state
    real = held(t for kept in state.values() for t in kept.values() if isinstance(t, Tensor))
    assert sum(p.bytes for p in memory.parts if p.name == "optimizer") == real


def test_what_is_frozen_has_no_gradient_and_no_state() -> None:
    """The second layer has HIDDEN * CLASSES + CLASSES; Adam keeps two of each, and two counts."""
    memory = estimate(built(freeze=["0"]), {})
    last = FLOAT * (HIDDEN * CLASSES + CLASSES)
    assert of(memory, "gradients") == last
    assert of(memory, "optimizer") == 2 * last + 2 * FLOAT


def test_an_optimizer_that_asks_for_a_closure_is_not_guessed() -> None:
    model = mlp()
    assert state_bytes(optim.LBFGS(model.parameters())) is None


def test_the_optimizer_is_left_as_it_is() -> None:
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.1, foreach=True)
    before = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in model.parameters()]
    state_bytes(optimizer)
    assert optimizer.state_dict() == before[0]
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before[1], strict=True))
    assert all(p.grad is None for p in model.parameters())


# --- what is kept for backward: by hand ---


def kept(task: Task, largest: int = BATCH) -> int:
    done = rehearse(task, largest)
    assert done.problem == ""
    return done.kept


def test_activations_of_an_mlp_by_hand() -> None:
    """What ReLU gives, which the second layer's input is too; what log-softmax gives; and the
    weight of the mean, one number. Input and target are the batch's, the weights the model's."""
    done = rehearse(built(), BATCH)
    assert done.samples == BATCH
    assert done.batch == BATCH * (INPUTS * FLOAT + LONG)
    assert done.kept == FLOAT * (BATCH * HIDDEN + BATCH * CLASSES + 1)


def test_activations_are_those_of_the_planned_precision() -> None:
    """In bfloat16: the input, what ReLU gives and the second weight once more, in half the bytes;
    log-softmax is computed in float32. Of the first weight nothing is needed."""
    expected = HALF * (BATCH * INPUTS + BATCH * HIDDEN + HIDDEN * CLASSES)
    assert kept(built(precision="bfloat16")) == expected + FLOAT * (BATCH * CLASSES + 1)


def test_activation_checkpointing_keeps_the_input_instead() -> None:
    """Of what is computed again nothing is kept but what goes in, which is the batch's."""
    inner = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    task = built(nn.Sequential(inner), model_options=ModelOptions(checkpoint=["0"]))
    assert kept(task) == FLOAT * (BATCH * CLASSES + 1)


def test_a_batch_norm_keeps_its_input_and_its_statistics() -> None:
    """The first layer's output is kept once, and mean and deviation of each feature."""
    more = BATCH * HIDDEN + 2 * HIDDEN
    assert kept(built(mlp(nn.BatchNorm1d(HIDDEN)))) - kept(built()) == FLOAT * more


def test_what_is_thrown_away_on_the_way_is_not_kept() -> None:
    """Each pass keeps what exp gives until its sum is forgotten; the last line is the MLP's."""

    class Wasteful(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for copies in (1, 2, 3):
                self[0](x.repeat(copies, 1)).exp().sum()
            return super().forward(x)

    assert kept(built(Wasteful(*mlp()))) == kept(built())


def test_a_gradient_that_the_step_asks_for_is_as_it_is_without_counting() -> None:
    """Of x^3 at x the gradient is 3 x^2, whose own is 6 x."""
    found = []

    def step(task: Any) -> None:
        x = task.next_batch().input.clone().requires_grad_()
        (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        found.append((x.detach(), slope.detach(), bend.detach()))
        task.backward(task.forward(slope).sum())

    step.whole_model_forward = True  # type: ignore[attr-defined]
    assert kept(built(train_step=step)) > 0
    ((x, slope, bend),) = found
    torch.testing.assert_close(slope, 3 * x.square())
    torch.testing.assert_close(bend, 6 * x)


@pytest.mark.parametrize(("processes", "expected"), [(1, 3), (2, 3), (3, 2), (4, 2)])
def test_the_micro_batch_is_the_largest_of_a_process(processes: int, expected: int) -> None:
    """6 samples in pieces of at most 4: 3 and 3; of 2 processes 3 each; of 3 and 4, 2."""
    task = built(train=Data(samples(), BATCH, micro_batch_size=4))
    assert micro_batch(task, processes) == expected
    done = rehearse(task, expected)
    assert done.samples == expected
    assert done.kept == FLOAT * (expected * HIDDEN + expected * CLASSES + 1)


def test_a_batch_size_that_grows_counts_at_its_largest() -> None:
    data = Data(samples(), {1: 2, 3: 8})
    task = built(train=data, phases=Phases(epochs=4))
    assert micro_batch(task, 1) == 8
    assert rehearse(task, 8).samples == 8


# --- nothing of it is noticed ---


def test_a_rehearsal_leaves_everything_as_it_was() -> None:
    """A model with statistics and dropout, data that draw: none of it moves."""

    class Drawing(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            return torch.rand(INPUTS) + random.random() + float(np.random.rand()), index % CLASSES

    task = built(mlp(nn.BatchNorm1d(HIDDEN), nn.Dropout()), train=Data(Drawing(), BATCH))

    def everything() -> list[Any]:
        generators = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
        tensors = {name: value.tolist() for name, value in task.bare_model.state_dict().items()}
        progress = dataclasses.asdict(task.progress)
        return [*generators, tensors, progress, [m.training for m in task.bare_model.modules()]]

    before = everything()
    first, second = rehearse(task, BATCH), rehearse(task, BATCH)
    assert first == second and first.kept > 0
    assert everything() == before
    assert all(p.grad is None for p in task.bare_model.parameters())


# --- several processes ---


def test_of_several_processes_each_has_its_share_of_a_batch_and_messages() -> None:
    memory = estimate(built(), {}, processes=3)
    alone = estimate(built(), {})
    assert of(memory, "parameters") == of(alone, "parameters")
    assert of(memory, "messages") == of(memory, "gradients")
    assert of(memory, "micro-batch") * 3 == of(alone, "micro-batch")
    assert memory.lines()[0].endswith("on each of 3 processes")


def test_fsdp_has_a_shard_of_each_parameter() -> None:
    """Rows of the first dimension over 3 processes, the largest share: of 8 rows 3, of 2 one."""
    memory = estimate(built(backend=Fsdp(device="cpu")), {"average": Average()}, processes=3)
    shard = FLOAT * (3 * INPUTS + 3 + 1 * HIDDEN + 1)
    assert of(memory, "parameters") == of(memory, "gradients") == shard
    assert of(memory, "hook average") == shard
    assert of(memory, "optimizer") == 2 * shard + 4 * FLOAT
    assert "messages" not in {part.name for part in memory.parts}
    assert any("whole while they compute" in text for text in memory.unknown)


# --- what is not known is said ---


def window_step(task: Any) -> None:
    raise AssertionError("it is not called")


window_step.takes = "window"  # type: ignore[attr-defined]


def silent_step(task: Any) -> None:
    task.forward(task.next_batch().input)


silent_step.whole_model_forward = True  # type: ignore[attr-defined]


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("too large\nand more")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train_step": window_step}, "the step window_step goes through the model in a way of"),
        ({"train_step": silent_step}, "ValueError: the step silent_step did not call"),
        ({"model": Failing(INPUTS, CLASSES)}, "RuntimeError: too large"),
        (
            {"train": Data(r1.Samples(), BATCH, collate=lambda rows: None)},
            "ValueError: the collate",
        ),
        ({"train": None, "test": Data(samples(), BATCH), "optimizer": None}, "nothing is trained"),
    ],
    ids=["window", "no backward", "failing", "no batch", "test only"],
)
def test_what_cannot_be_measured_is_said(options: Any, said: str) -> None:
    if options.get("optimizer", True) is None:
        task = Task(model=mlp(), criterion=nn.CrossEntropyLoss(), test=options["test"],
                    phases=Phases(updates=1))  # fmt: skip
        task.build()
    else:
        task = built(**options)
    memory = estimate(task, {})
    assert any(text.startswith(f"what is kept for backward: {said}") for text in memory.unknown)
    assert not {"micro-batch", "kept for backward"} & {part.name for part in memory.parts}


def test_a_stream_is_not_read() -> None:
    task = r1.make_task(None, train=Data(_Stream(), 4))
    task.build()
    assert rehearse(task, 4).problem == "a stream is read by the training alone"


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("it is read")


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (1023 * 1024, "1,023 KiB"),
     (1 << 20, "1 MiB"), (5 << 40, "5 TiB"), (5000 << 40, "5,000 TiB")],
)  # fmt: skip
def test_sizes_in_words(count: int, said: str) -> None:
    assert size(count) == said
