"""What may change between a run and its continuation, and how the rest is named."""

from __future__ import annotations

from typing import Any

import pytest

import phaseloop.hooks
from phaseloop.engine import registry
from phaseloop.engine.checkpoint import compare
from phaseloop.engine.checkpoint.compare import forbidden_changes
from phaseloop.engine.config import schema
from phaseloop.engine.config.defaults import defaults

CONFIG: dict[str, Any] = {
    "seed": 0,
    "run": {"dir": "runs/a", "resume": "auto", "threads": 1},
    "phases": {"epochs": 3, "updates": None, "min_epochs": 0, "test_every_epochs": 1},
    "data": {
        "train": {"dataset": {"name": "digits", "workers": 3}, "batch_size": 4, "workers": 0,
                  "micro_batch_size": None, "shuffle": True},
        "test": {"dataset": {"name": "digits"}, "batch_size": 8, "workers": 0},
    },
    "model": {"name": "cnn", "compile": False, "width": 8},
    "optimizer": {"name": "sgd", "lr": 0.1, "groups": [{"lr": 0.1}]},
    "hooks": {
        "learning_rate": {}, "early_stop": {"patience": 3}, "checkpoint": {"keep_last": 1},
        "metrics_file": {}, "non_finite": {"policy": "stop"}, "mine": {"name": "metrics_file"},
    },
}  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """The configuration with one value changed; ``...`` as value: without the key."""

    def put(tree: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        key, *rest = keys
        if not rest:
            kept = {k: v for k, v in tree.items() if k != key}
            return kept if value is ... else {**tree, key: value}
        return {**tree, key: put(tree.get(key, {}), rest)}

    return put(CONFIG, path.split("."))


def test_the_same_is_no_change() -> None:
    assert forbidden_changes(CONFIG, changed("seed", 0)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("phases.epochs", 5), ("phases.updates", 100), ("phases.min_epochs", 2),
        ("phases.test_every_epochs", None), ("phases.test_every_updates", 3),
        ("run.dir", "runs/b"), ("run.threads", 2), ("run.resume", "never"), ("run", ...),
        ("backend", {"name": "ddp"}), ("launch", {"nodes": 2}), ("plan", True), ("only", "test"),
        ("data.train.workers", 2), ("data.test.workers", 2), ("data.train.micro_batch_size", 2),
        ("data.train.accumulate", 2), ("data.train.prefetch", 4), ("data.test.pin_memory", True),
        ("model.compile", True),
        ("hooks.early_stop.patience", 9), ("hooks.early_stop", None), ("hooks.early_stop", ...),
        ("hooks.checkpoint.keep_last", 3), ("hooks.checkpoint", None),
        ("hooks.metrics_file", None), ("hooks.metrics_file", ...), ("hooks.mine", None),
        ("hooks.mine.file", "other"), ("hooks.tensorboard", {}),
        ("hooks.second", {"name": "barrier"}),
    ],
)  # fmt: skip
def test_may_change(path: str, value: Any) -> None:
    assert forbidden_changes(CONFIG, changed(path, value)) == []
    assert forbidden_changes(changed(path, value), CONFIG) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", 1, "seed: 0 -> 1"),
        ("seed", ..., "seed: 0 -> absent"),
        ("precision", "bfloat16", "precision: absent -> 'bfloat16'"),
        ("optimizer.lr", 0.2, "optimizer.lr: 0.1 -> 0.2"),
        ("optimizer.groups", [{"lr": 0.2}], "optimizer.groups: [{'lr': 0.1}] -> [{'lr': 0.2}]"),
        ("data.train.batch_size", 8, "data.train.batch_size: 4 -> 8"),
        ("data.train.shuffle", False, "data.train.shuffle: True -> False"),
        ("data.train.dataset.workers", 1, "data.train.dataset.workers: 3 -> 1"),
        ("data.test.dataset.workers", 1, "data.test.dataset.workers: absent -> 1"),
        ("data.workers", 1, "data.workers: absent -> 1"),
        ("model.width", 9, "model.width: 8 -> 9"),
        ("hooks.learning_rate", ..., "hooks.learning_rate: {} -> absent"),
        ("hooks.mine.name", "learning_rate", "hooks.mine.name: 'metrics_file' -> 'learning_rate'"),
        ("hooks.unknown", {}, "hooks.unknown: absent -> {}"),
    ],
)  # fmt: skip
def test_all_else_is_named_with_both_values(path: str, value: Any, message: str) -> None:
    assert forbidden_changes(CONFIG, changed(path, value)) == [message]


def test_several_are_all_named() -> None:
    now = {**changed("seed", 1), "model": {"name": "mlp"}}
    assert forbidden_changes(CONFIG, now) == [
        "seed: 0 -> 1",
        "model.name: 'cnn' -> 'mlp'",
        "model.width: 8 -> absent",  # compile, gone too, may change
    ]


def test_a_hook_that_declares_nothing_is_taken_to_change_the_training() -> None:
    assert phaseloop.hooks  # registers them
    for entry in registry.hooks:
        watches = entry.target.only_watches  # type: ignore[attr-defined]
        changes = forbidden_changes({"hooks": {}}, {"hooks": {entry.name: {}}})
        may = watches or entry.name in ("early_stop", "checkpoint", "non_finite", "fit_memory")
        assert (changes == []) is may, entry.name


@pytest.mark.parametrize("key", ["early_stop", "checkpoint", "metrics_file"])
def test_a_key_of_a_free_hook_frees_no_other_hook(key: str) -> None:
    for kind in ({"name": "average"}, {"_target_": "mine.Mixup"}):
        before, now = ({"hooks": {key: {**kind, "by": by}}} for by in (1, 2))
        assert forbidden_changes(before, now) == [f"hooks.{key}.by: 1 -> 2"]
        assert forbidden_changes({"hooks": {key: {}}}, now) != []
    free = ({"hooks": {"mine": {"name": "early_stop", "patience": n}}} for n in (1, 2))
    assert forbidden_changes(*free) == []


def test_each_of_several_by_one_name_is_compared() -> None:
    before: dict[str, Any] = {"parts": [{"name": "noise", "std": n} for n in (1, 2, 3)]}
    for number, path in enumerate(["noise", "noise 2", "noise 3"]):
        now = {"parts": [dict(part) for part in before["parts"]]}
        now["parts"][number]["std"] = 9
        assert forbidden_changes(before, now) == [f"parts.{path}.std: {number + 1} -> 9"]
    ordered = [{"name": "order"}, {"name": "b"}]
    assert forbidden_changes({"parts": ordered}, {"parts": ordered[::-1]}) != []


# --- a checkpoint of an earlier version, or of a later one ---

STAGES = {
    "phases": [{"name": "warm", "epochs": 1, "new": 3}, {"name": "main", "epochs": 2, "new": 4}]
}
STAGE_DEFAULTS = {"phases": [{"name": "warm", "new": 3}, {"name": "main", "new": 3}]}


@pytest.mark.parametrize(
    ("now", "defaults", "changes"),
    [
        ({"new": None}, {"new": None}, []),
        ({"new": 2}, {"new": None}, ["new: absent -> 2"]),
        ({"new": None}, {}, ["new: absent -> None"]),  # a component's: nobody knows its default
        ({"new": {"a": 1}}, {"new": {"a": 1}}, []),
        ({"data": {"train": {"new": 0}}}, {"data": {"train": {"new": 0}}}, []),
        ({"data": {"train": {"new": 1}}}, {"data": {"train": {"new": 0}}},
         ["data.train.new: absent -> 1"]),
    ],
)  # fmt: skip
def test_a_key_that_the_checkpoint_does_not_know_stood_at_its_default(
    now: dict[str, Any], defaults: dict[str, Any], changes: list[str]
) -> None:
    assert forbidden_changes({"data": {"train": {}}}, {"data": {"train": {}}, **now}, defaults) == (
        changes
    )


def test_so_do_keys_of_stages() -> None:
    before = {"phases": [{"name": "warm", "epochs": 1}, {"name": "main", "epochs": 2}]}
    assert forbidden_changes(before, STAGES, STAGE_DEFAULTS) == ["phases.main.new: absent -> 4"]


def test_a_key_that_was_given_up_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forbidden_changes({"old": 1}, {}) == ["old: 1 -> absent"]
    monkeypatch.setattr(compare, "GONE", {"old": 1})
    assert forbidden_changes({"old": 1}, {}) == []
    assert forbidden_changes({"old": 2}, {}) == ["old: 2 -> absent"]


def test_the_defaults_of_a_configuration() -> None:
    config = {
        "model": {"name": "m"},
        "phases": [{"name": "a", "epochs": 1}],
        "data": {"test": {"one": {"dataset": {"name": "d"}, "batch_size": 2, "workers": 3}}},
    }
    found = defaults(schema.check(config))
    assert found["seed"] == 0 and found["run"]["grace"] == 8.0
    assert found["phases"][0]["name"] == "a" and found["phases"][0]["repeat"] == 1
    assert found["phases"][0]["epochs"] is None
    assert found["data"]["test"]["one"]["workers"] == 0
    assert found["data"]["train"] is None
    assert "model" not in found and "batch_size" not in found["data"]["test"]["one"]
