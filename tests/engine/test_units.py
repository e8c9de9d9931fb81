"""Units: which parts of a model fsdp gathers together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phaseloop.engine.backends.fsdp import Fsdp
from phaseloop.engine.backends.units import roots_of, units_of
from phaseloop.engine.errors import ConfigError
from tests.engine.test_fsdp_features import Pair
from tests.rigs.sharded import Net


def test_units_are_the_blocks() -> None:
    # Inner sequences belong to their block; a function without parameters is no unit.
    assert set(units_of(Net())) == {"blocks.0", "blocks.1"}
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert set(units_of(net)) == {"1", "3"}
    assert units_of(nn.Linear(2, 2)) == {}


def test_lists_of_lists_are_gone_into() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert set(units_of(nn.Sequential(nn.Sequential(inner)))) == {"0"}  # a Sequential has a forward
    assert set(units_of(_Holder(nn.ModuleList([inner])))) == {"part.0.0", "part.0.1"}


class _Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_shares_a_parameter_with_others_is_no_unit() -> None:
    net = Net()
    net.blocks[1][0].weight = net.first.weight
    assert set(units_of(net)) == {"blocks.0"}
    with pytest.raises(ConfigError, match=r"backend\.shard: blocks\.1 shares blocks\.1\.0\.weight"):
        units_of(net, ["blocks.*"])


def test_patterns_name_units_and_the_inner_come_first() -> None:
    assert list(units_of(Net(), ["blocks.*", "last"])) == [
        "blocks.0.0", "blocks.1.0", "blocks.0", "blocks.1", "last",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"backend\.shard: 'blcks\.\*' matches no module"):
        units_of(Net(), ["blcks.*"])
    with pytest.raises(ConfigError, match="matches no module"):
        units_of(Net(), ["blocks"])  # a list cannot be called


def test_a_model_without_a_forward_has_several_roots() -> None:
    assert set(roots_of(Pair())) == {"generator", "discriminator"}
    assert set(roots_of(Net())) == {""}
    held = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)]), "b": nn.ReLU()})
    assert set(roots_of(held)) == {"a.0"}


def _tied(model: nn.Module, *places: str) -> nn.Module:
    """All of these places of a model hold the parameter of the first."""
    first = model.get_parameter(places[0])
    for place in places[1:]:
        owner, _, key = place.rpartition(".")
        model.get_submodule(owner).register_parameter(key, first)
    return model


def _holder(inner: nn.Module, **parameters: nn.Parameter) -> nn.Module:
    model = nn.Module()
    model.inner, model.other = inner, nn.Linear(2, 2)
    for name, parameter in parameters.items():
        model.register_parameter(name, parameter)
    return model


def test_what_two_roots_share_is_refused_and_not_untied() -> None:
    linear = nn.Linear(2, 2)
    tied = {
        "generator.first.weight and discriminator.last.weight": _tied(
            Pair(), "generator.first.weight", "discriminator.last.weight"
        ),
        "inner.weight and own": _holder(linear, own=linear.weight),
        "inner.weight and list.0": _holder(linear, unused=nn.Parameter(torch.ones(3))),
        "inner.weight and other.part.weight": _holder(linear),
    }
    tied["inner.weight and list.0"].list = nn.ParameterList([linear.weight])
    tied["inner.weight and other.part.weight"].other = _Holder(linear)
    for names, model in tied.items():
        with pytest.raises(ConfigError, match=rf"model: {names} are one parameter"):
            Fsdp("cpu").prepare_model(model)


def test_what_roots_may_share() -> None:
    point = nn.Parameter(torch.tensor(0.5))  # whole everywhere, and so nothing comes apart
    inner, twice = nn.Linear(2, 2), nn.Linear(2, 2)
    inner.point = point
    model = _holder(inner, point=point, own=nn.Parameter(torch.ones(3)))
    model.other.point = point
    assert set(roots_of(model)) == {"inner", "other"}
    # One module with two names is one root; tied within a root is tied.
    assert set(roots_of(nn.ModuleDict({"a": twice, "b": nn.ModuleList([twice])}))) == {"a"}
    assert set(roots_of(_holder(Net()))) == {"inner", "other"}


# --- what is refused ---


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"backend\.shard: 'blocks\.\*' is not a list"):
        Fsdp("cpu", shard="blocks.*")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"backend\.timeout"):
        Fsdp("cpu", timeout=0)
    with pytest.raises(ConfigError, match=r"backend\.shard: 'generator': .* generator\.\*"):
        Fsdp("cpu", shard=["generator"]).prepare_model(Pair())


def test_only_the_ordinary_layout_can_be_cut() -> None:
    net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=r"model\.channels_last: weight is not contiguous"):
        Fsdp("cpu").prepare_model(net)


def test_a_model_has_values() -> None:
    with pytest.raises(ConfigError, match=r"model: weight is on torch's meta device"):
        Fsdp("cpu").prepare_model(nn.Linear(2, 2, device="meta"))


def test_one_process_holds_everything() -> None:
    backend, net = Fsdp("cpu"), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert backend.prepare_model(net) is net and not backend.shards
    assert backend.prepare_optimizer(optimizer) is optimizer
    assert type(net.first.weight) is nn.Parameter
