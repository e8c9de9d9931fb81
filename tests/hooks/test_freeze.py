"""``freeze`` and the hook of that name: what is frozen, how long, and what never moves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Hook, Task
from phaseloop.engine.config import schema
from phaseloop.engine.config.build import build
from phaseloop.engine.freezing import Freezing
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.freeze import Freeze
from tests.rigs import r1
from tests.rigs.probes import Break, BreakAt, watch
from tests.rigs.r0 import train

UPDATES = r1.UPDATES
"""Updates in an epoch."""


class Net(nn.Module):
    """A backbone with batch norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8, affine=False)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With a weight decay that would move whatever it is applied to."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


def make(folder: Path | None = None, **options: Any) -> Task:
    """Net for 2 epochs of 10 updates, tested every 4 updates."""
    settings = {"epochs": 2, "test": True, "phases": {"test_every_updates": 4}}
    return r1.make_task(folder, **{"model": Net(), "optimizer": adamw, **settings, **options})


def values(task: Task) -> dict[str, Tensor]:
    """All parameters and buffers as they are now."""
    return {name: value.clone() for name, value in task.bare_model.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def names(task: Task, *prefixes: str) -> set[str]:
    return {name for name in task.bare_model.state_dict() if name.startswith(prefixes)}


# --- what a pattern names ---


@pytest.mark.parametrize(
    ("pattern", "parameters", "norms"),
    [
        ("head", {"head.weight", "head.bias"}, set()),
        ("head.*", {"head.weight", "head.bias"}, set()),
        ("*.bias", {"backbone.0.bias", "backbone.1.bias", "head.bias"}, set()),
        ("backbone.1.*", {"backbone.1.weight", "backbone.1.bias"}, {"backbone.1"}),
        ("backbone.1.weight", {"backbone.1.weight"}, set()),
        ("backbone.3", set(), {"backbone.3"}),
        (
            "backbone",
            {"backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias"},
            {"backbone.1", "backbone.3"},
        ),
    ],
)
def test_patterns_name_parameters_and_modules(
    pattern: str, parameters: set[str], norms: set[str]
) -> None:
    matched = Freezing({"": Net()}).match([pattern], "freeze")
    assert matched.parameters == parameters
    assert matched.norms == norms


def test_the_criterion_is_named_with_its_prefix() -> None:
    matched = Freezing({"": Net(), "criterion": nn.Linear(1, 1)}).match(["criterion"], "freeze")
    assert matched.parameters == {"criterion.weight", "criterion.bias"}


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"^freeze: the pattern 'bakbone\.\*' .*backbone"):
        make(freeze=["bakbone.*"])
    with pytest.raises(ConfigError, match=r"^freeze: .*There are: backbone, head"):
        make(freeze=["xyz"])
    with pytest.raises(ConfigError, match=r"^freeze: give a list of patterns, not 'head'"):
        make(freeze="head")
    with pytest.raises(ConfigError, match=r"^hooks\.part\.patterns: .*Nearest: head"):
        train(make(), part=Freeze(["haed.*"], first_updates=1))


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^freeze: the patterns freeze all"):
        train(make(freeze=["*"]))
    with pytest.raises(ConfigError, match=r"^hooks\.part\.patterns: the patterns freeze all"):
        train(make(freeze=["head"]), part=Freeze(["backbone"], first_updates=1))


# --- for good ---


def test_frozen_for_good_nothing_moves_it() -> None:
    task = make(freeze=["backbone"])
    before = values(task)
    train(task)
    assert moved(before, values(task)) == names(task, "head")
    state = task.optimizers["optimizer"].state
    assert {id(p) for p in state} == {id(p) for p in task.bare_model.head.parameters()}


class WakeAll(Hook):
    """What fine-tuning code does that knows of no freezing."""

    def on_phase_end(self, task: Task) -> None:
        if task.train:
            task.bare_model.requires_grad_(True)
            task.bare_model.train()


def test_frozen_for_good_nobody_wakes_it() -> None:
    task = make(freeze=["backbone"], epochs=3)
    before = values(task)
    part = Freeze(["backbone.0", "head.bias"], first_updates=5)
    train(task, wake=WakeAll(), part=part)
    assert moved(before, values(task)) == names(task, "head")


def test_what_was_frozen_before_the_run_stays_so() -> None:
    task = make()
    task.bare_model.backbone[0].weight.requires_grad_(False)
    task.bare_model.backbone[1].eval()
    before = values(task)
    train(task, part=Freeze(["backbone"], first_updates=5))
    stayed = {n for n in names(task, "backbone.0.weight", "backbone.1.running", "backbone.1.num")}
    assert moved(before, values(task)) == names(task, "") - stayed


def test_the_root_key_of_a_configuration() -> None:
    config = {
        "imports": ["tests.rigs.tiny"],
        "model": {"name": "tiny_model"},
        "phases": {"epochs": 1},
        "data": {"train": {"dataset": {"name": "tiny_data"}, "batch_size": 4}},
        "criterion": {"name": "cross_entropy"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "freeze": ["0"],
        "run": {"threads": 1},
    }
    task = build(schema.check(config)).task
    before = values(task)
    train(task)
    assert moved(before, values(task)) == {"3.weight", "3.bias"}
    assert task.identity["freeze"] == ["0.bias", "0.weight"]


# --- for a part of the run ---


def when_moved() -> Any:
    """A probe: after which update each of the model's tensors first had moved."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    now: dict[str, Tensor] = {}

    def look(task: Task) -> tuple[dict[str, int], dict[str, int]]:
        new = values(task)
        for name in moved(now, new) if now else ():
            first.setdefault(name, task.progress.updates + 1)
            last[name] = task.progress.updates + 1
        now.update(new)
        return first, last

    return watch("on_update", look)


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        ({"first_updates": 7}, 8, 2 * UPDATES),
        ({"first_epochs": 1}, UPDATES + 1, 2 * UPDATES),
        ({"after_updates": 7}, 2, 7),  # the probe sees the first change at the second update
        ({"after_epochs": 1}, 2, UPDATES),
    ],
)
def test_frozen_in_exactly_these_updates(options: dict[str, int], first: int, last: int) -> None:
    task = make()
    probe = when_moved()
    train(task, part=Freeze(["backbone"], **options), probe=probe)
    firsts, lasts = probe.seen[-1]
    for name in names(task, "backbone"):
        assert (firsts[name], lasts[name]) == (first, last), name
    for name in names(task, "head"):
        assert (firsts[name], lasts[name]) == (2, 2 * UPDATES)


def test_what_two_hold_is_woken_by_the_last() -> None:
    task = make()
    probe = when_moved()
    train(
        task,
        long=Freeze(["backbone.0"], first_updates=9),
        short=Freeze(["backbone"], first_updates=4),
        probe=probe,
    )
    firsts, _ = probe.seen[-1]
    assert firsts["backbone.0.weight"] == 10
    assert firsts["backbone.1.weight"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"hooks\.freeze: give exactly one of first_updates, .* got none"),
        ({"first_updates": 1, "after_epochs": 1}, r"got first_updates, after_epochs"),
        ({"first_epochs": 0}, r"hooks\.freeze\.first_epochs: 0 is less than 1"),
    ],
)
def test_options_that_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Freeze(["head"], **options)


# --- over tests and resumes ---


def flags(task: Task) -> dict[str, bool]:
    return {name: module.training for name, module in task.bare_model.named_modules()}


@pytest.mark.parametrize("at", [3, 4, 10, 15])
@pytest.mark.parametrize(
    "options", [{"first_updates": 4}, {"first_epochs": 1}, {"after_updates": 13}], ids=str
)
def test_data_e_over_tests_and_a_resume(tmp_path: Path, at: int, options: dict[str, int]) -> None:
    """At 4 and 10 it breaks off with a test due; at 10 an epoch ends."""

    def go(folder: Path | None, **hooks: Hook) -> Task:
        task = make(folder, freeze=["backbone.3"])
        train(task, part=Freeze(["backbone.0", "backbone.1"], **options), **hooks)
        return task

    whole = go(None)
    save = Checkpoint(every_updates=1)
    with pytest.raises(Break):
        go(tmp_path, save=save, stop=BreakAt(at))
    resumed = go(tmp_path, save=Checkpoint(every_updates=1))
    assert resumed.resumed and resumed.progress.updates == 2 * UPDATES
    assert flags(resumed) == flags(whole)
    assert not flags(whole)["backbone.3"]
    assert moved(values(whole), values(resumed)) == set()
    states = [task.optimizers["optimizer"].state_dict()["state"] for task in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    for number, entry in states[0].items():
        assert all(torch.equal(entry[key], states[1][number][key]) for key in entry)


def test_data_e_flags_in_every_phase() -> None:
    task = make(freeze=["backbone.1"])
    seen = watch("on_forward", lambda task: (task.train, flags(task)))
    train(task, seen=seen)
    for in_training, found in seen.seen:
        assert found["backbone.1"] is False
        assert found["backbone.3"] is found["head"] is in_training
