"""Parameter groups by rule: which parameter goes where, and with which options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import ConfigError, GroupRules, LayerDecay, Schedule, Warmup, parameter_groups
from phaseloop.engine.schedules import Rates, constant, cosine, linear

OPTIONS = {"lr": 0.1, "weight_decay": 0.01, "betas": (0.9, 0.999), "amsgrad": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.attention = nn.MultiheadAttention(2, 1)


class SquareNorm(nn.Module):
    """A normalization of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 2))


class Transformer(nn.Module):
    """An embedding, three blocks, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(1, 2))
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.last = SquareNorm()
        self.head = nn.Linear(2, 4)


def grouped(rules: GroupRules, **more: Any) -> dict[str, dict[str, Any]]:
    """Group name to its options, with names for parameters; each is in exactly one."""
    model = more.pop("model", None) or Transformer()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = parameter_groups(model, more.pop("options", OPTIONS), rules, **more)
    seen = [id(p) for group in groups for p in group["params"]]
    assert len(seen) == len(set(seen))
    if more.get("only") is None and more.get("criterion") is None:
        assert set(seen) == set(names)
    found = {
        g["name"]: {**g, "params": [names.get(id(p), "?") for p in g["params"]]} for g in groups
    }
    assert len(found) == len(groups)
    return found


def test_no_rules_is_one_group() -> None:
    groups = grouped(GroupRules())
    assert list(groups) == ["rest"]
    assert set(groups["rest"]) == {"name", "params"}  # all options are the optimizer's own


# Of each block: norm.weight, norm.bias, and of attention in_proj_weight, in_proj_bias,
# out_proj.weight, out_proj.bias.
NORMS = {f"blocks.{i}.norm.{n}" for i in range(3) for n in ("weight", "bias")} | {"last.gain"}
BIASES = {
    *(f"blocks.{i}.{n}" for i in range(3)
      for n in ("norm.bias", "attention.in_proj_bias", "attention.out_proj.bias")),
    "head.bias",
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (["norm"], NORMS),
        (["bias"], BIASES),
        (["norm", "bias"], NORMS | BIASES),
        (["embedding", "pos*"], {"embed.weight", "position"}),
        (["vector"], (NORMS | BIASES) - {"last.gain"}),
    ],
)
def test_what_does_not_decay(what: list[str], expected: set[str]) -> None:
    groups = grouped(GroupRules(no_decay=what))
    assert set(groups) == {"rest", "no_decay"}
    assert set(groups["no_decay"]["params"]) == expected
    assert groups["no_decay"]["weight_decay"] == 0
    assert "weight_decay" not in groups["rest"]


def test_a_rule_gives_options_or_scales_the_optimizers_own() -> None:
    rules = {
        "head": {"match": "head.*", "lr_scale": 10, "amsgrad": True},
        "ends": {
            "match": ["position", "head.weight", "last.*"],
            "lr": 0.5,
            "weight_decay_scale": 2,
        },
    }
    groups = grouped(GroupRules(rules=rules))
    assert groups["head"]["params"] == ["head.weight", "head.bias"]  # the first rule takes them
    assert groups["head"]["lr"] == 10 * 0.1
    assert groups["head"]["amsgrad"] is True
    assert groups["ends"]["params"] == ["position", "last.gain"]
    assert (groups["ends"]["lr"], groups["ends"]["weight_decay"]) == (0.5, 0.02)
    assert set(groups) == {"head", "ends", "rest"}


def test_layer_decay_falls_from_the_top_to_the_bottom() -> None:
    """BEiT: of 3 layers the last gets factor, the first factor ** 3, what is below factor ** 4."""
    groups = grouped(GroupRules(layer_decay=LayerDecay(0.5, "blocks.*")))
    rates = {name: group.get("lr", 0.1) for name, group in groups.items()}
    assert rates == {
        "below": 0.1 * 0.5**4, "blocks.0": 0.1 * 0.5**3, "blocks.1": 0.1 * 0.5**2,
        "blocks.2": 0.1 * 0.5, "rest": 0.1,
    }  # fmt: skip
    assert groups["below"]["params"] == ["position", "embed.weight"]
    assert groups["rest"]["params"] == ["last.gain", "head.weight", "head.bias"]
    assert all(n.startswith("blocks.1.") for n in groups["blocks.1"]["params"])
    assert len(groups["blocks.1"]["params"]) == 6


def test_what_is_below_the_layers_may_be_said() -> None:
    decay = LayerDecay(0.5, ["blocks.*"], below=["embed*"])
    groups = grouped(GroupRules(layer_decay=decay))
    assert groups["below"]["params"] == ["embed.weight"]
    assert "position" in groups["rest"]["params"]


def test_layers_may_have_several_patterns() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    decay = LayerDecay(0.5, ["1.*", "0"])
    groups = grouped(GroupRules(layer_decay=decay), model=model)
    assert {n: g["lr"] for n, g in groups.items()} == {
        "0": 0.1 * 0.5**3, "1.0": 0.1 * 0.5**2, "1.1": 0.1 * 0.5,
    }  # fmt: skip


def test_all_of_it_together() -> None:
    rules = GroupRules(
        no_decay=["norm", "bias"],
        layer_decay=LayerDecay(0.5, "blocks.*"),
        rules={"attention": {"match": "*.attention.*", "lr_scale": 3, "weight_decay": 0.2}},
    )
    groups = grouped(rules)
    per_block = ["attention.blocks.{}", "attention.blocks.{}.no_decay", "blocks.{}.no_decay"]
    named = {name.format(i) for i in range(3) for name in per_block}
    assert set(groups) == {"below", "rest", "no_decay", *named}
    one = groups["attention.blocks.1"]
    assert (one["lr"], one["weight_decay"]) == (pytest.approx(0.1 * 3 * 0.25), 0.2)
    assert groups["attention.blocks.1.no_decay"]["weight_decay"] == 0
    assert groups["blocks.1.no_decay"]["lr"] == 0.1 * 0.25
    assert groups["no_decay"]["params"] == ["last.gain", "head.bias"]


def test_frozen_parameters_are_in_a_group_too() -> None:
    """A hook may unfreeze them, and a resume finds the groups that it was saved with."""
    model = Transformer()
    model.blocks[0].requires_grad_(False)
    assert grouped(GroupRules(no_decay=["bias"]), model=model).keys() == {"rest", "no_decay"}


def test_a_shared_parameter_is_in_one_group() -> None:
    model = Transformer()
    model.tied = nn.Linear(2, 3, bias=False)
    model.tied.weight = model.embed.weight
    groups = grouped(GroupRules(no_decay=["embedding"]), model=model)
    assert groups["no_decay"]["params"] == ["embed.weight"]


def test_the_criterions_parameters_have_its_name_before_theirs() -> None:
    criterion = nn.Linear(1, 1)
    rules = GroupRules(rules={"loss": {"match": "criterion.*", "lr": 1.0}}, no_decay=["bias"])
    groups = parameter_groups(nn.Linear(1, 1), OPTIONS, rules, criterion=criterion)
    by_name = {group["name"]: group["params"] for group in groups}
    assert by_name["loss"] == [criterion.weight]
    assert by_name["loss.no_decay"] == [criterion.bias]


def test_only_some_of_the_parameters() -> None:
    names = ["head.weight", "head.bias", "position"]
    groups = grouped(GroupRules(no_decay=["bias"]), only=names)
    assert {n: g["params"] for n, g in groups.items()} == {
        "rest": ["position", "head.weight"], "no_decay": ["head.bias"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="matches no parameter"):
        grouped(GroupRules(rules={"b": {"match": "blocks.*", "lr": 1.0}}), only=names)


@pytest.mark.parametrize(
    ("rules", "key", "text"),
    [
        ({"rules": {"head": {"match": "haed.*", "lr": 1}}}, "rules.head.match",
         "'haed.*' matches no parameter. The nearest are: head."),
        ({"rules": {"head": {"match": ["head.*", "x.*"], "lr": 1}}}, "rules.head.match", "'x.*'"),
        ({"rules": {"head": {"lr": 1}}}, "rules.head.match", "None is no pattern"),
        ({"rules": {"head": {"match": "head.*"}}}, "rules.head", "changes nothing"),
        ({"rules": {"head": {"match": "head.*", "lr_scael": 1}}}, "rules.head.lr_scael",
         "Did you mean 'lr_scale'?"),
        ({"rules": {"head": {"match": "head.*", "amsgrad_scale": 1}}}, "rules.head.amsgrad_scale",
         "no such option"),
        ({"rules": {"head": {"match": "head.*", "lr_scale": "2"}}}, "rules.head.lr_scale",
         "not a number"),
        ({"rules": {"a": {"match": "*", "lr": 1}, "b": {"match": "head.*", "lr": 1}}}, "rules.b",
         "takes nothing: rules before it have all of it: a"),
        ({"rules": {"rest": {"match": "head.*", "lr": 1}}}, "rules",
         "two groups are called 'rest'"),
        ({"no_decay": ["norms"]}, "no_decay", "'norms' is not bias, embedding, norm, vector"),
        ({"layer_decay": LayerDecay(0.0, "blocks.*")}, "layer_decay.factor", "(0, 1]"),
        ({"layer_decay": LayerDecay(0.5, "block.*")}, "layer_decay.layers", "'block.*'"),
        ({"layer_decay": LayerDecay(0.5, "blocks.*", "pre*")}, "layer_decay.below", "'pre*'"),
    ],
)  # fmt: skip
def test_a_rule_that_fits_nothing_is_an_error(rules: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        grouped(GroupRules(**rules))
    assert error.value.key == f"optimizer.groups.{key}"
    assert text in str(error.value)


def test_an_optimizer_without_decay_cannot_leave_it_out() -> None:
    with pytest.raises(ConfigError, match="no option 'weight_decay'"):
        grouped(GroupRules(no_decay=["bias"]), options={"lr": 0.1})
    with pytest.raises(ConfigError, match="there is no lr to scale"):
        grouped(GroupRules(layer_decay=LayerDecay(0.5, "blocks.*")), options={"weight_decay": 0.1})


# --- with schedules ---


def adamw(rules: GroupRules) -> torch.optim.Optimizer:
    options = {"lr": 0.1, "weight_decay": 0.01}
    return torch.optim.AdamW(parameter_groups(Transformer(), options, rules), **options)


def test_a_schedule_is_multiplied_by_a_groups_scale() -> None:
    """Also where the curve and the warm-up have values of their own."""
    optimizer = adamw(GroupRules(rules={"head": {"match": "head.*", "lr_scale": 10}}))
    schedule = Schedule(cosine(end=0.02), warmup=Warmup(0.001, updates=2))
    schedule.plan(6, 1)
    rates = Rates(optimizer, [schedule])
    for k in range(6):
        rates.set(k, 0)
        body = 0.001 + 0.099 * k / 2
        if k >= 2:
            body = 0.02 + 0.08 * (1 + math.cos(math.pi * (k - 2) / 4)) / 2
        values = {g["name"]: g["lr"] for g in optimizer.param_groups}
        assert values == {"rest": pytest.approx(body), "head": pytest.approx(10 * body)}


def test_what_does_not_decay_has_none_whatever_the_schedule() -> None:
    """DINO raises the decay from .04 to .4: not that of biases."""
    optimizer = adamw(GroupRules(no_decay=["bias"]))
    schedule = Schedule(linear(0.04, 0.4), option="weight_decay")
    schedule.plan(4, 1)
    Rates(optimizer, [schedule]).set(2, 0)
    values = {g["name"]: g["weight_decay"] for g in optimizer.param_groups}
    assert values == {"rest": pytest.approx(0.22), "no_decay": 0}


def test_a_schedule_for_some_groups_leaves_the_others() -> None:
    optimizer = adamw(GroupRules(rules={"head": {"match": "head.*", "lr": 1.0}}))
    fall = Schedule(linear(), groups=["head"])
    hold = Schedule(constant(), groups=["rest"])
    for schedule in (fall, hold):
        schedule.plan(4, 1)
    Rates(optimizer, [fall, hold]).set(1, 0)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups} == {"rest": 0.1, "head": 0.75}
    with pytest.raises(ConfigError, match=r"'haed'. Did you mean 'head'\? There are: head, rest"):
        Rates(optimizer, [Schedule(linear(), groups=["haed"])])
    with pytest.raises(ConfigError, match="same option"):
        Rates(optimizer, [fall, Schedule(linear())])


def test_momentum_of_adam_is_the_first_of_its_betas() -> None:
    optimizer = adamw(GroupRules())
    schedule = Schedule(linear(end=0.5), option="momentum")
    schedule.plan(4, 1)
    rates = Rates(optimizer, [schedule])
    rates.set(2, 0)
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.7), 0.999)
    assert rates.options == ["lr", "momentum"]
    assert list(rates.values("momentum")) == [(0, pytest.approx(0.7))]
