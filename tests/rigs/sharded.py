"""A network whose parameters no number of processes divides, trained on any backend in float64."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from phaseloop import Data, Gradients, Hook, Phases, Run, Task, Trainer
from phaseloop.engine import registry
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.engine.checkpoint.optimizer_state import named_state
from phaseloop.engine.shards import is_shard, local, whole
from phaseloop.hooks.non_finite import NonFinite
from tests.rigs import equal, r1

SAMPLES = 22
"""In batches of 6 they make three full updates and one of 4."""


class Net(nn.Module):
    """Blocks in a list, a tied layer, a norm with buffers, parameters of one and of no element.

    Args:
        batch_norm: not a layer norm; its statistics are those of a share, so that the number of
            processes changes what it computes.
    """

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(7) if batch_norm else nn.LayerNorm(7)
        self.one = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.back = nn.Linear(7, 7, bias=False)
        self.back.weight = self.first.weight
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.back(self.norm(x))) * self.scale + self.one


def data(samples: int = SAMPLES, poison: int | None = None) -> TensorDataset:
    """Points in seven dimensions with targets in three.

    Args:
        poison: the sample of this index is not finite.
    """
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 7, generator=generator)
    if poison is not None:
        x[poison] = float("nan")
    return TensorDataset(x, torch.randn(samples, 3, generator=generator))


def model(seed: int, make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """A network, made from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(**options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
}


def task(
    folder: Path | None = None,
    *,
    backend: str = "single",
    optimizer: str = "sgd",
    epochs: float = 2,
    micro: int | None = None,
    clip: Mapping[str, Any] | None = None,
    test: int | None = None,
    test_every: int | None = None,
    seed: int = 0,
    poison: int | None = None,
    net: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Task:
    """One task of this rig.

    Args:
        folder: of the run; None: nothing is saved.
        micro: samples of a micro-batch.
        clip: options of :class:`Gradients`.
        test: samples of a test set; None: there is none.
        test_every: updates between tests; None: at each epoch's end.
        seed: of the weights: processes may begin with different ones.
        poison: index of a training sample that is not finite.
        net: options of the network.
        options: of the backend.
        more: anything else that a task takes; ``model`` and ``criterion`` are classes, ``make`` is
            the function that makes the optimizers.
    """
    return Task(
        model=model(seed, more.pop("model", Net), **(net or {})),
        criterion=more.pop("criterion", nn.MSELoss)(),
        optimizer=more.pop("make", OPTIMIZERS[optimizer]),
        train=Data(data(poison=poison), batch_size=6, micro_batch_size=micro),
        test=None if test is None else Data(data(test), batch_size=4),
        gradients=Gradients(**(clip or {})),
        phases=Phases(epochs=epochs, test_every_updates=test_every),
        precision=more.pop("precision", "float64"),
        backend=registry.backends.get(backend).target(**{"device": "cpu", **(options or {})}),
        run=Run(dir=None if folder is None else str(folder), threads=1),
        **more,
    )


class Watch(Hook):
    """Keeps what every update measured; an ordinary number, the same on all processes."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_update(self, task: Task) -> None:
        if task.gradient_norm is not None:
            assert type(task.gradient_norm) is Tensor
            self.norms.append(float(task.gradient_norm))


def train(
    folder: Path,
    *,
    hooks: Mapping[str, Hook] | None = None,
    save: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train in ``folder``; metrics and norms of the gradients.

    Args:
        hooks: further ones.
        save: options of the checkpoint hook.
        options: see :func:`task`; a list of ``seed`` has one for each rank; ``policy`` is that of
            the hook ``non_finite``.
    """
    seeds = options.pop("seed", 0)
    seed = seeds if isinstance(seeds, int) else seeds[int(os.environ.get("RANK", 0))]
    watch = Watch()
    finite = NonFinite(options.pop("policy", "stop"))
    made = task(folder, seed=seed, **options)
    all_ = r1.make_hooks(save=save, watch=watch, **{"non_finite": finite, **(hooks or {})})
    outcome = Trainer(made, all_).train()
    return {
        "final": dict(outcome.final),
        "norms": watch.norms,
        "updates": outcome.updates,
    }


class Look(Hook):
    """Notes what a resumed task holds, whole, before it goes on: as :func:`saved` has it."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_start(self, task: Task) -> None:
        assert task.resumed
        names = task.parameter_names()
        here = {
            "model": dict(task.raw_state()),
            "optimizers": {n: named_state(o, names) for n, o in task.optimizers.items()},
            "averages": task.averages,
        }
        # Held in parts, each of its own; and nothing else of it here.
        if task.backend.shards:
            for tensor in (*here["model"].values(), *task.averages.get("average", {}).values()):
                if is_shard(tensor):
                    part = local(tensor)
                    assert part.untyped_storage().nbytes() < tensor.nbytes or tensor.shape[0] == 1
        self.seen = copy.deepcopy(whole(here, keep=True))


def taken(folder: Path, **options: Any) -> dict[str, Any]:
    """Resume the run in ``folder``, to its end: what was loaded, whole."""
    look = Look()
    hooks = {"look": look, **options.pop("hooks", {})}
    train(folder, hooks=hooks, **options)
    return look.seen


def saved(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint has of the model, the optimizers and the averages."""
    newest = equal.newest(folder)
    state = equal.state_of(newest)
    return {
        "model": dict(store.load(newest, MODEL)),
        **{name: state[name] for name in ("optimizers", "averages")},
    }


def furthest(a: Any, b: Any) -> float:
    """The largest difference of two trees of tensors and numbers of the same form."""
    if isinstance(a, Mapping):
        assert list(a) == list(b)
        return max((furthest(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list):
        assert len(a) == len(b)
        return max((furthest(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, Tensor):
        assert type(b) in (Tensor, nn.Parameter) and (a.shape, a.dtype) == (b.shape, b.dtype)
        return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, float):
        return abs(a - b)
    assert a == b
    return 0.0
