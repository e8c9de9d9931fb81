"""Optimizer state by name: kept exactly, matched by name and group, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine.checkpoint.optimizer_state import (
    load_named_state,
    named_state,
    parameter_names,
)
from phaseloop.engine.errors import CheckpointError, PhaseloopError
from tests.rigs.equal import differ

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9)),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def train(net: nn.Module, optimizer: Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 15).reshape(5, 3).to(next(net.parameters()).dtype)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (net(x) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saved_and_loaded_it_goes_on_the_same(kind: str) -> None:
    make = OPTIMIZERS[kind]
    first = model()
    optimizer = make(first.parameters())
    train(first, optimizer, 3)
    names = parameter_names({"": first})
    state = copy.deepcopy(named_state(optimizer, names))

    second = model()
    second.load_state_dict(first.state_dict())
    other = make(second.parameters())
    load_named_state(other, parameter_names({"": second}), copy.deepcopy(state), "optimizer")
    again = named_state(other, parameter_names({"": second}))
    assert list(differ("state", state, again)) == []

    train(first, optimizer, 3)
    train(second, other, 3)
    assert list(differ("model", first.state_dict(), second.state_dict())) == []
    for a, b in zip(optimizer.param_groups, other.param_groups, strict=True):
        plain = [{k: v for k, v in group.items() if k != "params"} for group in (a, b)]
        assert plain[0] == plain[1]


class Odd(torch.optim.SGD):
    """An optimizer with state of other types than its parameters'."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["count"] = torch.zeros_like(parameter, dtype=torch.int64)
                    state["seen"] = torch.zeros_like(parameter, dtype=torch.bool)
                    state["calls"] = 0
                state["sum"] += parameter.grad.double() / 3
                state["count"] += 2**40 + 1  # more than a float32 can hold
                state["calls"] += 1
        return super().step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_keeps_its_own_types(dtype: torch.dtype) -> None:
    """torch's own loading gives all state the parameter's type, and so loses bits."""
    first = model(dtype)
    optimizer = Odd(first.parameters(), lr=0.1)
    train(first, optimizer, 3)
    names = parameter_names({"": first})
    state = copy.deepcopy(named_state(optimizer, names))
    other = Odd((second := model(dtype)).parameters(), lr=0.1)
    load_named_state(other, parameter_names({"": second}), state, "optimizer")
    again = named_state(other, parameter_names({"": second}))
    assert list(differ("state", state, again)) == []
    assert again["state"]["0.weight"]["count"].dtype == torch.int64


def test_a_fresh_optimizer_has_no_state_and_gets_none() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    names = parameter_names({"": net})
    state = named_state(optimizer, names)
    assert state["state"] == {}
    load_named_state(optimizer, names, state, "optimizer")
    assert named_state(optimizer, names)["state"] == {}
    train(net, optimizer, 1)
    steps = {float(entry["step"]) for entry in named_state(optimizer, names)["state"].values()}
    assert steps == {1.0}  # not one too many


def groups(net: nn.Module, *parts: list[str]) -> list[dict[str, Any]]:
    """Parameter groups by names of parameters, each with a learning rate of its own."""
    named = dict(net.named_parameters())
    return [
        {"params": [named[name] for name in part], "lr": 0.1 * (number + 1)}
        for number, part in enumerate(parts)
    ]


WEIGHTS, BIASES = ["0.weight", "2.weight"], ["0.bias", "2.bias"]


def test_groups_and_parameters_in_another_order() -> None:
    first = model()
    optimizer = torch.optim.SGD(groups(first, WEIGHTS, BIASES), momentum=0.9)
    train(first, optimizer, 2)
    state = copy.deepcopy(named_state(optimizer, parameter_names({"": first})))

    second = model()
    second.load_state_dict(first.state_dict())
    other = torch.optim.SGD(groups(second, BIASES[::-1], WEIGHTS[::-1]), momentum=0.9)
    load_named_state(other, parameter_names({"": second}), state, "optimizer")
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]  # as saved, by name
    train(first, optimizer, 2)
    train(second, other, 2)
    assert list(differ("model", first.state_dict(), second.state_dict())) == []


@pytest.mark.parametrize(
    "parts",
    [[[*WEIGHTS, *BIASES]], [WEIGHTS], [WEIGHTS, ["0.bias"]], [["0.weight"], ["2.weight"], BIASES]],
)
def test_other_groups_are_refused(parts: list[list[str]]) -> None:
    net = model()
    names = parameter_names({"": net})
    optimizer = torch.optim.SGD(groups(net, WEIGHTS, BIASES), momentum=0.9)
    train(net, optimizer, 1)
    state = named_state(optimizer, names)
    other = torch.optim.SGD(groups(net, *parts), momentum=0.9)
    with pytest.raises(CheckpointError, match="mine"):
        load_named_state(other, names, state, "mine")
    assert not other.state  # nothing is half taken over


def test_what_is_missing_and_what_is_left_over_is_named() -> None:
    net = model()
    names = parameter_names({"": net})
    state = named_state(torch.optim.SGD(groups(net, ["0.weight", "0.bias"])), names)
    other = torch.optim.SGD(groups(net, ["0.weight", "2.bias"]))
    message = r"Only here: 2\.bias\. Only in the checkpoint: 0\.bias\."
    with pytest.raises(CheckpointError, match=message):
        load_named_state(other, names, state, "optimizer")


def test_a_parameter_without_a_name_is_refused() -> None:
    net, stranger = model(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*net.parameters(), stranger], lr=0.1)
    with pytest.raises(PhaseloopError, match="group 0 holds a parameter"):
        named_state(optimizer, parameter_names({"": net}))


def test_names_of_a_criterion_and_of_shared_parameters() -> None:
    net, criterion = model(), nn.Linear(1, 1)
    net[2].bias = net[2].bias  # the same object under the same name
    tied = nn.ModuleDict({"a": net, "b": net[0]})
    names = parameter_names({"": tied, "criterion": criterion})
    assert len(names) == 4 + 2
    assert names[id(net[0].weight)] == "a.0.weight"  # the first of its names
    assert names[id(criterion.weight)] == "criterion.weight"
