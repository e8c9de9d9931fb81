"""Backend ``ddp``: two processes make the update that one makes, whatever the step does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Phases, Task, TensorData
from tests.rigs import pairs
from tests.rigs.pairs import Case, Failed

SAMPLES = 22
"""In batches of 5 the last has two samples; of 5, the processes have 3 and 2."""


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def make(model: nn.Module, *, backend: Mapping[str, Any] | None = None, **options: Any) -> Task:
    """Two epochs in float64 on this process, or on all that there are."""
    data = {"batch_size": 5, **options.pop("data", {})}
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": adam,
        "train": Data(TensorData(*options.pop("samples", samples())), **data),
        "phases": Phases(epochs=2),
        "precision": "float64",
        "backend": pairs.ddp(**(backend or {})),
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


CASES: dict[str, Case] = {
    "plain": (plain, {}),
    "windows": (plain, {"data": {"batch_size": 5, "micro_batch_size": 2}}),
    "many buckets": (plain, {"backend": {"bucket_mb": 1e-5}}),
}
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
