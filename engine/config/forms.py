"""Forms: data that a layer says in its other form stands in the place of what was there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_other_form(config: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without what ``layer`` takes the place of.

    Several test sets stand in the place of one, a mix in the place of a dataset, and the reverse.
    """
    lower, higher = config.get("data"), layer.get("data")
    if not (isinstance(lower, Mapping) and isinstance(higher, Mapping)):
        return config
    left = dict(lower)
    test, new_test = lower.get("test"), higher.get("test")
    if isinstance(test, Mapping) and isinstance(new_test, Mapping):
        several = any(isinstance(v, Mapping) and "dataset" in v for v in new_test.values())
        if several if "dataset" in test else _is_component(new_test.get("dataset")):
            del left["test"]
    train, new_train = lower.get("train"), higher.get("train")
    if isinstance(train, Mapping) and isinstance(new_train, Mapping):
        gone: tuple[str, ...] = ()
        if isinstance(new_train.get("mix"), Mapping) and "dataset" not in new_train:
            gone = ("dataset",)
        elif _is_component(new_train.get("dataset")) and "mix" not in new_train:
            gone = ("mix", "epoch_samples")
        left["train"] = {k: v for k, v in train.items() if k not in gone}
    return {**config, "data": left}


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and ("name" in value or "_target_" in value)
