"""What processes of a run have equal: buffers of every kind, gradients, and when that is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Phases, TensorData
from tests.engine import test_ddp
from tests.rigs import pairs

BUFFERS: dict[str, Any] = {
    "int16": lambda: torch.ones(3, dtype=torch.int16),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "bool": lambda: torch.ones((), dtype=torch.bool),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "expanded": lambda: torch.ones(2, 1).expand(2, 3),
    "of any order": lambda: torch.ones(2, 3).t(),
    "empty": lambda: torch.ones(0),
}


class Holder(nn.Module):
    """A layer with a buffer of each kind; after every update those of rank 1 are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        for name, make in BUFFERS.items():
            self.register_buffer(f"of {name}", make() * (1 - pairs.rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Wrong(Hook):
    """Replaces the buffers, as a module may do; notes what the next window begins with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_forward(self, task: Any) -> None:
        self.seen.append({name: b.tolist() for name, b in task.bare_model.named_buffers()})

    def on_step(self, task: Any) -> None:
        module = task.bare_model
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = (buffer * 0 if pairs.rank() else buffer).clone()


def buffers() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    wrong = Wrong()
    data = {"batch_size": 4}
    pairs.train(test_ddp.make(Holder(), data=data, precision="float32", samples=few()), wrong=wrong)
    return wrong.seen


def few() -> tuple[Tensor, Tensor]:
    x, y = test_ddp.samples(8)
    return x.float(), y


def of_no_buffers() -> int:
    """Messages of buffers, of a model that has none."""
    task = test_ddp.make(test_ddp.network())
    task.backend.make_equal, calls = _counted(task.backend.make_equal)  # type: ignore[method-assign]
    pairs.train(task)
    return len(calls) - 4  # parameters and buffers, of model and criterion, before the first window


def _counted(function: Any) -> tuple[Any, list[Any]]:
    calls: list[Any] = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return counted, calls


def large_half() -> list[Any]:
    """The mean of gradients whose sum is larger than any float16."""
    backend = pairs.ddp()
    backend.setup()
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.full((2,), 40_000.0, dtype=torch.float16)
    backend.reduce_gradients([parameter])
    assert parameter.grad is not None
    return parameter.grad.tolist()


def patience() -> list[tuple[bool, int]]:
    """Whether it is the long limit from now on, and updates made."""
    data = Data(TensorData(*test_ddp.samples(6)), batch_size=3)
    task = test_ddp.make(test_ddp.network(), test=data)
    said: list[tuple[bool, int]] = []
    task.backend.patient = lambda on: said.append((on, task.progress.updates))  # type: ignore[method-assign]
    pairs.train(task)
    return said


def stopped(folder: Path | None, at: int | None, **backend: Any) -> dict[str, Any]:
    """Parameters after two epochs of windows of two, or when it was stopped."""
    from phaseloop import Run
    from phaseloop.hooks.checkpoint import Checkpoint

    torch.manual_seed(1)
    layers = [nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)]
    x, y = test_ddp.samples(48)
    task = test_ddp.make(
        nn.Sequential(*layers), precision="float32", backend=backend,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train=Data(TensorData(x.float(), y), batch_size=6, micro_batch_size=1),
        phases=Phases(epochs=2), run=Run(dir=str(folder), threads=1),
    )  # fmt: skip
    pairs.train(task, checkpoint=Checkpoint(), stop=Stop(at))
    return dict(task.bare_model.state_dict())


class Stop(Hook):
    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_step(self, task: Any) -> None:
        if task.updated and task.progress.updates == self.at:
            task.request_stop("here")


def resumed(folder: Path, **backend: Any) -> list[str]:
    """Names of what a run that was stopped and went on has not as one that was not."""
    whole = stopped(folder / "whole", None, **backend)
    stopped(folder / "parts", 5, **backend)
    parts = stopped(folder / "parts", None, **backend)
    return [name for name, value in whole.items() if not torch.equal(value, parts[name])]


def test_what_two_processes_have_equal(tmp_path: Path) -> None:
    cases: list[pairs.Case] = [
        (large_half, {}), (of_no_buffers, {}), (buffers, {}), (patience, {}),
        (resumed, {"folder": tmp_path / "static", "static_graph": True}),
    ]  # fmt: skip
    halves, none, held, waits, static = pairs.results(cases)
    assert halves == [[40_000.0, 40_000.0]] * 2
    assert none == [0, 0]
    expected = {f"of {name}": make().tolist() for name, make in BUFFERS.items()}
    assert held == [[expected] * 4] * 2  # of 8 samples in batches of 4, in two epochs
    # At the second update all have made one; the first of two tests may compile; it ends.
    assert waits == [[(False, 2), (True, 5), (False, 5), (False, 10)]] * 2
    assert static == [[], []]


def test_what_three_processes_have_equal_after_a_resume(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"bucket_mb": 0.001},  # of the 5.1 kB that the gradients are
        {"find_unused_parameters": True, "bucket_mb": 0.001},
        {"static_graph": True, "find_unused_parameters": True},
    ]
    found = pairs.results(
        [(resumed, {"folder": tmp_path / str(n), **one}) for n, one in enumerate(options)],
        processes=3,
    )
    assert found == [[[]] * 3] * 3
