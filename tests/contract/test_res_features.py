"""RES-o over features: a run with each, and with two together, is killed anywhere and resumed."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Batch,
    Data,
    Gradients,
    GroupRules,
    LossScale,
    Precision,
    Stage,
    TorchSchedule,
    parameter_groups,
)
from phaseloop.engine.schedules import Schedule, cosine
from phaseloop.hooks.average import Average
from phaseloop.hooks.freeze import Freeze
from phaseloop.train_steps import Alternating, TruncatedBackpropagation
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, probe_of
from tests.rigs.r1 import At

# --- the features; each is what `r1.train` is given for it ---


class Turns:
    """Both layers have the same loss, and take turns at it."""

    def first(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch.input), batch.target)

    last = first


def by_layer(model: nn.Sequential) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for each linear layer."""
    return {
        "first": torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        "last": torch.optim.Adam(model[3].parameters(), lr=0.01),
    }


def turns() -> dict[str, Any]:
    return {
        "optimizer": by_layer,
        "every": {"last": 2},
        "train_step": Alternating(),
        "criterion": Turns(),
        "schedule": {"last": Schedule(cosine())},
        "gradients": {"first": Gradients(clip_norm=0.5)},
        "data": {"micro_batch_size": 3},
        "train_meters": {},
    }


def frequencies() -> dict[str, Any]:
    return {"optimizer": by_layer, "every": {"first": 3}, "data": {"accumulate": 2}}


def closure() -> dict[str, Any]:
    model = r1.network()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    return {"model": model, "optimizer": lbfgs, "train_step": "closure"}


class Walks(r1.Samples):
    """Every sample is a walk of seven steps away from a point; its target is where it began."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        steps = torch.randn(7, 4).cumsum(dim=0)
        return {
            "input": self.x[index] + steps,
            "target": self.x[index].expand(7, 4),
            "index": index,
        }


class Recurrent(nn.Module):
    """A recurrent layer and its read-out; the state is nested."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.rnn = nn.GRU(4, 6, batch_first=True)
            self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(x, None if state is None else state["deep"][0])
        return self.out(output), {"deep": [hidden]}


def tbptt() -> dict[str, Any]:
    model = Recurrent()
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
        "criterion": nn.MSELoss(),
        "train": Data(Walks(), 4, shuffle=False),
        "train_step": TruncatedBackpropagation(3, stateful=True),
        "train_meters": {},
    }


def half() -> dict[str, Any]:
    """The scale is so large that some updates overflow, and grows again every three updates."""
    return {"precision": Precision("float16", LossScale(initial=2.0**20, growth_interval=3))}


def averages() -> dict[str, Any]:
    return {
        "test": True,
        "hooks": {
            "ema": Average(decay=0.9),
            "swa": Average(kind="swa", start_updates=4, test=False),
        },
        "save": {"keep_best": 1, "metric": "test/loss"},
    }


def make_step(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)


def groups() -> dict[str, Any]:
    """Parameter groups by rule, a scheduler of torch's, clipping."""
    model = r1.network()
    rules = GroupRules(no_decay=["bias"], rules={"head": {"match": "3.*", "lr_scale": 10}})
    options = {"lr": 0.02, "weight_decay": 0.1}
    made = parameter_groups(model, options, rules)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(made, **options),
        "schedule": TorchSchedule(make_step, interval="update", frequency=3),
        "gradients": Gradients(clip_norm=0.3, clip_value=0.2),
    }


def sizes() -> dict[str, Any]:
    return {"train": Data(r1.Samples(augment=True), {1: 4, 2: 7}, micro_batch_size=3)}


def frozen() -> dict[str, Any]:
    hooks = {"freeze": Freeze(["0.*"], first_updates=7), "late": Freeze(["3.bias"], after_epochs=1)}
    return {"hooks": hooks}


def stages() -> dict[str, Any]:
    return {
        "phases": [
            Stage(name="a", epochs=0.6, freeze=["3.*"]),
            Stage(name="b", repeat=2, epochs=0.7, schedule=r1.schedule("composite")),
        ]
    }


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f
    for f in (turns, frequencies, closure, tbptt, half, averages, groups, sizes, frozen, stages)
}

# What can be had together: no two of these say the same option.
TOGETHER = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not (set(FEATURES[pair[0]]()) - {"hooks"}) & (set(FEATURES[pair[1]]()) - {"hooks"})
    and not {*pair} >= {"closure", "half"}
    and not {*pair} >= {"tbptt", "averages"}  # the test set has no walks
    and not {*pair} >= {"turns", "averages"}  # two losses, and no test/loss
    and not {*pair} >= {"frozen", "stages"}  # each freezes another layer, and nothing is left
    and not {*pair} >= {"tbptt", "frozen"}  # other names
    and not {*pair} >= {"tbptt", "stages"}
    and not {*pair} >= {"closure", "sizes"}  # no micro-batches
]


def train(folder: Path, names: tuple[str, ...], at: At | None = None) -> dict[str, Any]:
    """R1 with these features, two epochs."""
    options: dict[str, Any] = {"epochs": 2}
    hooks: dict[str, Any] = {}
    for name in names:
        given = FEATURES[name]()
        hooks.update(given.pop("hooks", {}))
        options.update(given)
    save = {"every_updates": 3, **options.pop("save", {})}
    if at is not None:
        hooks["at"] = at
    return r1.train(folder, probe_of(folder), hooks=hooks, save=save, **options)


EVENTS = ("on_forward", "on_backward", "on_gradients", "on_update", "on_step", "on_phase_end")


def check(tmp_path: Path, names: tuple[str, ...], kills: int) -> None:
    """Kill at random events, resume each time, and in the end compare."""
    rng = random.Random("+".join(names))
    whole, folder = tmp_path / "whole", tmp_path / "run"
    last = process.result(train, whole, names)["updates"]
    died, update = 0, 0
    while died < kills and update < last:
        update = min(last, update + rng.randint(1, max(1, last // kills)))
        at = At(rng.choice(EVENTS), update)
        ended = process.run(train, folder, names, at)
        assert ended.code in (0, -signal.SIGKILL), ended.output
        died += ended.code != 0
        if ended.code == 0:  # the event does not come at that update: in a test phase, say
            break
    process.result(train, folder, names)
    assert_eq(whole, folder)


@pytest.mark.parametrize("name", FEATURES)
def test_res_o_with_each_feature(tmp_path: Path, name: str) -> None:
    check(tmp_path, (name,), kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_res_o_with_two_features_together(tmp_path: Path, names: tuple[str, str]) -> None:
    check(tmp_path, names, kills=6)
