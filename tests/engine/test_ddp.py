"""Backend ``ddp``: two processes make the update that one makes, whatever the step does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Phases, Task, TensorData, register_train_step
from phaseloop.engine.backends import Backend
from phaseloop.hooks.average import Average
from phaseloop.hooks.freeze import Freeze
from phaseloop.train_steps import Alternating, TruncatedBackpropagation
from tests.rigs import pairs
from tests.rigs.pairs import Case, Failed

SAMPLES = 22
"""In batches of 5 the last has two samples; of 5, the processes have 3 and 2."""


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3 + pairs.rank())  # all begin with the primary's values
    return make().double()


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def make(
    model: nn.Module, *, backend: Mapping[str, Any] | Backend | None = None, **options: Any
) -> Task:
    """Two epochs in float64 on this process, or on all that there are."""
    data = {"batch_size": 5, **options.pop("data", {})}
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": adam,
        "train": Data(TensorData(*options.pop("samples", samples())), **data),
        "phases": Phases(epochs=2),
        "precision": "float64",
        "backend": backend if isinstance(backend, Backend) else pairs.ddp(**(backend or {})),
    }
    return Task(model=model, **{**settings, **options})


def state(task: Task, **hooks: Hook) -> dict[str, Tensor]:
    """Train, and give every parameter and buffer, of the criterion too."""
    pairs.train(task, **hooks)
    found = dict(task.bare_model.state_dict())
    if isinstance(task.criterion_module, nn.Module):
        found.update({f"criterion.{k}": v for k, v in task.criterion_module.state_dict().items()})
    return found


# --- the cases: each is called in one process, and in each of two ---


def plain(**options: Any) -> Any:
    return state(make(network(), **options))


class Branches(nn.Module):
    """Every sample takes the branch that its last input says: those of a share, all the same.

    Args:
        third: there is one that nobody takes.
    """

    def __init__(self, third: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2 + third))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        outputs = hidden.new_zeros(len(x), 2)
        for number, head in enumerate(self.heads):
            taken = x[:, 3] == number
            if taken.any():
                outputs = outputs.index_put((taken.nonzero()[:, 0],), head(hidden[taken]))
        return outputs


def branched(pattern: list[int], batches: int = 4) -> tuple[Tensor, Tensor]:
    """Batches whose samples take these branches, in order."""
    x, y = samples(len(pattern) * batches)
    x[:, 3] = torch.tensor(pattern * batches)
    return x, y


def branches(pattern: list[int], step: Any = "standard", **options: Any) -> Any:
    """Only some of the parameters have a part in the loss of one process."""
    data = {"batch_size": len(pattern), "shuffle": False, **options.pop("data", {})}
    options = {"backend": {"find_unused_parameters": True}, **options}
    return state(
        make(
            seeded(lambda: Branches(third=True)), samples=branched(pattern), data=data,
            train_step=step, **options,
        )
    )  # fmt: skip


def bare(task: Task) -> None:
    """As ``standard``, but nobody has said that it goes through the whole model."""
    batch = task.next_batch()
    loss = task.criterion(task.bare_model(batch.input), batch.target)
    if task.train:
        task.backward(loss)
        task.update()


def averaged() -> Any:
    task = make(network())
    pairs.train(task, average=Average(decay=0.8))
    return dict(task.averages["average"])


def frozen(step: Any = "standard", **freeze: Any) -> Any:
    return state(make(network(), train_step=step), freeze=Freeze(["0"], **freeze))


class Centred(nn.Module):
    """Cross-entropy with a temperature that is trained, and a buffer that each process moves."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(()) + 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output * self.temperature, target)


def criterion_with_parameters() -> Any:
    criterion = seeded(Centred)

    def both(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=0.05)

    return state(make(network(), criterion=criterion, optimizer=both))


class Turns:
    """A loss for each of two optimizers."""

    def first(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch.input), batch.target)

    def second(self, model: Any, batch: Any) -> Tensor:
        return model(batch.input).square().mean(1).mean()


def alternating(**data: Any) -> Any:
    def optimizers(model: nn.Module) -> Any:
        return {
            "first": torch.optim.Adam(model[0].parameters(), lr=0.05),
            "second": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
        }

    step = Alternating()
    task = make(network(), criterion=Turns(), optimizer=optimizers, train_step=step, data=data)
    return state(task)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


class ByLoss(torch.optim.SGD):
    """Its rate is the loss that the closure gives."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            group["lr"] = float(loss)
        return super().step()


def by_loss(model: nn.Module) -> torch.optim.Optimizer:
    return ByLoss(model.parameters(), lr=1.0)


def closure() -> Any:
    def square(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, nn.functional.one_hot(target, 2))

    return state(make(network(), optimizer=lbfgs, criterion=square, train_step="closure"))


def _weighted_closure(task: Task) -> None:
    def evaluate() -> Tensor:
        (batch,) = task.window()
        loss, count = _of_valid(task, batch)
        task.backward(loss, weight=count)
        return loss

    if task.train:
        task.update(evaluate)


_weighted_closure.takes = "window"  # type: ignore[attr-defined]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, state: Any) -> Any:
        hidden, state = self.cell(x, state)
        return self.head(hidden), state


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def tbptt() -> Any:
    x = samples(8 * 22)[0].view(22, 8, 4)
    return state(
        make(
            seeded(Recurrent), samples=(x, x[..., :2].cumsum(1)), criterion=mean_square,
            train_step=TruncatedBackpropagation(3), data={"batch_size": 7},
        )
    )  # fmt: skip


def _of_valid(task: Task, batch: Any) -> tuple[Tensor, Tensor]:
    """The mean over the samples whose target is not -1, and how many those are."""
    count = (batch.target >= 0).sum()
    losses = nn.functional.cross_entropy(
        task.forward(batch.input), batch.target, ignore_index=-1, reduction="sum"
    )
    loss = losses / count.clamp(min=1)
    task.measure(loss, None, None, weight=count)
    return loss, count


@register_train_step("of_valid_in_test_ddp", whole_model_forward=True)
def of_valid(task: Task) -> None:
    batch = task.next_batch()
    loss, count = _of_valid(task, batch)
    task.backward(loss, weight=count)
    task.update()


def weighted(step: Any = of_valid, optimizer: Any = adam, **data: Any) -> Any:
    x, y = samples(22)
    y[::3] = -1
    y[8:12] = -1  # of the second process's share of the first batch of 12, nearly all
    y[6:12] = -1  # and all
    options = {"batch_size": 12, "shuffle": False, **data}
    task = make(network(), samples=(x, y), train_step=step, data=options, optimizer=optimizer)
    return state(task)


def _contrast(task: Task) -> None:
    """Each sample has to be nearer to its own second view than to the others' of the batch."""
    batch = task.next_batch()
    rows = batch.weight  # of a stand-in, none: its samples are another process's
    first, second = (task.forward(view)[:rows] for view in (batch.input, batch.input * 0.9 + 0.1))
    others = task.backend.gather_with_grad(second)
    start = sum(task.backend.all_gather_object(rows)[: task.backend.rank])
    labels = torch.arange(rows) + start
    losses = nn.functional.cross_entropy(first @ others.T, labels, reduction="sum")
    task.backward(losses / max(1, rows))
    task.update()


def _weighted_bare(task: Task) -> None:
    of_valid(task)


CASES: dict[str, Case] = {
    "plain": (plain, {}),
    "windows": (plain, {"data": {"batch_size": 5, "micro_batch_size": 2}}),
    "a last batch of one": (plain, {"data": {"batch_size": 7}}),
    "many buckets": (plain, {"backend": {"bucket_mb": 1e-5}}),
    "static graph": (plain, {"backend": {"static_graph": True}}),
    "static graph, windows": (
        plain, {"backend": {"static_graph": True}, "data": {"batch_size": 5, "micro_batch_size": 2}}
    ),
    "bare": (plain, {"train_step": bare}),
    "bare, windows": (plain, {"train_step": bare, "data": {"micro_batch_size": 2}}),
    "branches": (branches, {"pattern": [0, 0, 1, 1]}),
    "branches, windows": (
        branches, {"pattern": [0, 0, 1, 1, 0, 0, 0, 0], "data": {"micro_batch_size": 2}}
    ),
    "branches of a window's beginning": (
        branches, {"pattern": [0, 0, 1, 1, 0, 0, 1, 1], "data": {"micro_batch_size": 2}}
    ),
    "branches, buckets": (
        branches,
        {"pattern": [0, 0, 1, 1],
         "backend": {"find_unused_parameters": True, "bucket_mb": 1e-5}},
    ),
    "branches, bare": (branches, {"pattern": [0, 0, 1, 1], "step": bare}),
    "branches, bare, windows": (
        branches, {"pattern": [0, 0, 1, 1, 0, 0, 0, 0], "step": bare,
                   "data": {"micro_batch_size": 2}}
    ),
    "unfrozen at an epoch": (frozen, {"first_epochs": 1}),
    "unfrozen at an update": (frozen, {"first_updates": 3}),
    "frozen later": (frozen, {"after_updates": 3}),
    "unfrozen, bare": (frozen, {"first_updates": 3, "step": bare}),
    "criterion with parameters": (criterion_with_parameters, {}),
    "averages": (averaged, {}),
    "alternating": (alternating, {"batch_size": 5}),
    "alternating, windows": (alternating, {"batch_size": 5, "micro_batch_size": 2}),
    "closure": (closure, {}),
    "closure, weights": (
        weighted, {"step": _weighted_closure, "batch_size": 12, "optimizer": by_loss}
    ),
    "tbptt": (tbptt, {}),
    "weights": (weighted, {}),
    "weights, windows": (weighted, {"micro_batch_size": 2}),
    "weights, a last batch of one": (weighted, {"batch_size": 7}),
    "weights, bare": (weighted, {"step": _weighted_bare}),
    "gathered": (plain, {"train_step": _contrast, "criterion": None}),
    "gathered, a last batch of one": (
        plain, {"train_step": _contrast, "criterion": None, "data": {"batch_size": 7}}
    ),
}  # fmt: skip
_found: dict[str, list[Any]] = {}


def of_two(name: str) -> list[Any]:
    """What a case gave on each of two processes."""
    if not _found:
        _found.update(zip(CASES, pairs.results(list(CASES.values())), strict=True))
    return _found[name]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_updates_of_one(name: str) -> None:
    function, options = CASES[name]
    first, second = of_two(name)
    assert not isinstance(first, Failed), first
    alone = function(**options)
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=0, atol=1e-10)


def tbptt_of_other_lengths(short: str) -> Any:
    """The sequences of the second process are shorter, as a collate function may pad them.

    Args:
        short: in the training, or in a test, where processes go through the model together.
    """
    backend = pairs.ddp()
    backend.collective_forward = short == "test"  # type: ignore[misc]
    train, test = (
        torch.zeros(8, 6 - (pairs.rank() if short == name else 0), 4, dtype=torch.float64)
        for name in ("train", "test")
    )
    return state(
        make(
            seeded(Recurrent), samples=(train, train[..., :2]), criterion=mean_square,
            test=Data(TensorData(test, test[..., :2]), 4), train_step=TruncatedBackpropagation(5),
            data={"batch_size": 4}, backend=backend,
        )
    )  # fmt: skip


@pytest.mark.parametrize("short", ["train", "test"])
def test_sequences_that_differ_in_length_between_processes(short: str) -> None:
    ((first, second),) = pairs.results([(tbptt_of_other_lengths, {"short": short})])
    assert first == second
    assert "the processes' parts of a batch differ in time steps, [6, 5] by rank" in first
