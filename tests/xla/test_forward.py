"""How a model is computed on XLA: in bfloat16, and a second time in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Accuracy, Data, Hook, PhaseloopError, Phases, Task, TensorData, Trainer
from phaseloop.engine.model_options import ModelOptions
from phaseloop.engine.precision import Precision
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs import spmd

WAYS = ("xla", "spmd")


class Right(nn.Module):
    """Gives back its one-hot input, through a product that autocast does in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.seen.add(y.dtype)
        return y


class Types(Hook):
    """Notes the types of output, loss and gradients, and how many programs there are."""

    def __init__(self) -> None:
        self.output: set[torch.dtype] = set()
        self.loss: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()
        self.compiled: list[int] = []

    def on_forward(self, task: Task) -> None:
        self.output.add(task.output.dtype)

    def on_backward(self, task: Task) -> None:
        assert task.loss is not None
        self.loss.add(task.loss.dtype)
        self.gradients |= {p.grad.dtype for p in task.bare_model.parameters() if p.grad is not None}

    def on_step(self, task: Task) -> None:
        self.compiled.append(spmd.compiles())


def in_bfloat16(way: str) -> dict[str, Any]:
    """MET-d: 1000 correct samples; by twos, a sum in bfloat16 would stop at 512."""
    y = torch.randint(2, (1000,), generator=torch.Generator().manual_seed(0))
    model, types = Right(), Types()
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        train=Data(TensorData(nn.functional.one_hot(y).float(), y), 2),
        train_meters={"accuracy": Accuracy()},
        phases=Phases(epochs=1),
        precision="bfloat16",
        backend=spmd.backend(way),
    )
    outcome = Trainer(task, {"sync": MeterSync(), "types": types}).train()
    state = task.meter_sets["train"].meters["accuracy"].state_dict()
    return {
        "count": (int(state["count"]), state["count"].dtype),
        "accuracy": outcome.final["train/accuracy"],
        "inside": model.seen,
        "parameter": model.weight.dtype,
        **vars(types),
    }


class Block(nn.Module):
    """With everything that a second forward could do in another way than the first.

    It takes a keyword, gives a mapping, and its input needs no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        self.calls += 1
        return {"y": self.dropout(torch.tanh(self.norm(self.linear(x)))) * scale}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(18, 6))
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(6, 3)
        self.types: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=1.5)["y"]
        y = self.head(x)
        self.types.add(y.dtype)
        return y


class Program(Hook):
    """Notes the text of the first step's program."""

    def __init__(self) -> None:
        self.text = ""

    def on_gradients(self, task: Task) -> None:
        if not self.text:
            import torch_xla

            gradients = [p.grad for p in task.bare_model.parameters() if p.grad is not None]
            self.text = torch_xla._XLAC._get_xla_tensors_hlo(gradients)


def recomputed(way: str, precision: str = "float64") -> dict[str, Any]:
    """Trained plainly, and in channels-last layout with activation checkpointing."""
    found: dict[str, Any] = {}
    x = torch.randn(20, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    target = (x.sum(dim=(1, 2, 3)) > 0).long()
    for options in (ModelOptions(), ModelOptions(checkpoint=["blocks.*"], channels_last=True)):
        model, types, program = Blocks(), Types(), Program()
        task = Task(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            train=Data(TensorData(x, target), 8),
            phases=Phases(epochs=3),
            precision=Precision(precision),
            model_options=options,
            backend=spmd.backend(way),
        )
        Trainer(task, {"types": types, "program": program}).train()
        state = model.state_dict()
        found["checkpointed" if options.checkpoint else "plain"] = {
            "state": {name: t.cpu().double().flatten().tolist() for name, t in state.items()},
            "calls": [block.calls for block in model.blocks],
            "compiled": types.compiled,
            "tanh": program.text.count(" tanh("),
            "barriers": program.text.count(" opt-barrier("),
            "types": model.types,
            "draw": task.backend.rng_state(),
        }
    return found


class Doubles(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.mul_(2))


def changes_its_input(way: str) -> str:
    model = nn.Sequential(nn.Linear(6, 3), Doubles())
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)), 4),
        phases=Phases(epochs=1),
        model_options=ModelOptions(checkpoint=["1"]),
        backend=spmd.backend(way),
    )
    with pytest.raises(PhaseloopError) as caught:
        Trainer(task, {}).train()
    return str(caught.value)


CASES: dict[str, Callable[..., Any]] = {
    "bfloat16": in_bfloat16,
    "recomputed": recomputed,
    "in place": changes_its_input,
    "both": functools.partial(recomputed, precision="bfloat16"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """All cases in one process on one device, and in one on two those that are not long."""
    return {
        way: spmd.results(
            {
                name: functools.partial(case, way)
                for name, case in CASES.items()
                if way == "xla" or name != "bfloat16"
            }
        )
        for way in WAYS
    }


def test_met_d_a_thousand_samples_in_bfloat16_count_a_thousand(
    found: dict[str, dict[str, Any]],
) -> None:
    case = found["xla"]["bfloat16"]
    assert case["count"] == (1000, torch.int64)
    assert case["accuracy"] == 1.0
    assert case["inside"] == {torch.bfloat16}
    assert case["parameter"] == torch.float32
    assert case["output"] == case["loss"] == case["gradients"] == {torch.float32}
    assert len(set(case["compiled"][3:])) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["recomputed", "both"])
def test_activation_checkpointing_and_channels_last_change_no_number(
    found: dict[str, dict[str, Any]], way: str, case: str
) -> None:
    """Batches of 8, 8 and 4: nine steps, in each of which a checkpointed block runs twice."""
    plain, again = (found[way][case][name] for name in ("plain", "checkpointed"))
    tolerance = 1e-12 if case == "recomputed" else 1e-2
    assert plain["state"].keys() == again["state"].keys()
    for name, values in plain["state"].items():
        assert spmd.close(values, again["state"][name], tolerance), name
    assert plain["draw"] == again["draw"]
    assert (plain["calls"], again["calls"]) == ([9, 9], [18, 18])
    # In the program too: the barrier keeps XLA from taking the second for the first.
    assert (plain["tanh"], again["tanh"]) == (2, 4)
    assert (plain["barriers"], again["barriers"]) == (0, 2)
    assert plain["types"] == again["types"]
    assert again["types"] == {torch.float64 if case == "recomputed" else torch.bfloat16}


@pytest.mark.parametrize("way", WAYS)
def test_activation_checkpointing_compiles_nothing_later(
    found: dict[str, dict[str, Any]], way: str
) -> None:
    compiled = found[way]["recomputed"]["checkpointed"]["compiled"]
    assert len(set(compiled[5:])) == 1


def test_a_checkpointed_module_that_changes_its_input_is_an_error(
    found: dict[str, dict[str, Any]],
) -> None:
    for way in WAYS:
        assert "an input of a Doubles was changed in place" in found[way]["in place"]
