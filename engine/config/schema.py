"""Schema: every key that a configuration may have. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from phaseloop.engine.config.typed import check_keys, to_dataclass
from phaseloop.engine.data.source import check_options
from phaseloop.engine.errors import ConfigError, nearest
from phaseloop.engine.phases import Phases
from phaseloop.engine.settings import Gradients, Run

Component = dict[str, Any]
"""``{name: REGISTERED, ...options}`` or ``{_target_: importable.thing, ...options}``."""


@dataclass
class TestSet:
    """``data.test``: in the dataset's order, and no sample left out.

    See :class:`phaseloop.engine.data.source.Data`.
    """

    dataset: Component
    batch_size: int
    micro_batch_size: int | None = None
    accumulate: int | None = None
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    collate: Component | None = None


@dataclass
class TrainSet(TestSet):
    """``data.train``."""

    shuffle: bool = True
    drop_last: bool = False


@dataclass
class DataSets:
    """``data``."""

    train: TrainSet | None = None
    test: TestSet | None = None


@dataclass
class MeterSets:
    """``meters``: for each phase kind, name to component; the name is the default ``name``."""

    train: dict[str, Component | None] = field(default_factory=dict)
    test: dict[str, Component | None] = field(default_factory=dict)


@dataclass
class Schema:
    """The root."""

    model: Component
    phases: Phases
    seed: int = 0
    imports: list[str] = field(default_factory=list)
    allow_targets: list[str] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    data: DataSets = field(default_factory=DataSets)
    criterion: Component | None = None
    meters: MeterSets = field(default_factory=MeterSets)
    optimizer: Component | None = None
    schedule: Component | None = None
    gradients: Gradients = field(default_factory=Gradients)
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    train_step: Component | str = "standard"
    hooks: dict[str, Component | None] = field(default_factory=dict)
    backend: Component = field(default_factory=lambda: {"name": "single"})
    freeze: list[str] = field(default_factory=list)
    plan: bool = False
    only: Literal["test"] | None = None
    weights: str = "best"


def check(config: dict[str, Any]) -> Schema:
    """The configuration as dataclasses.

    Raises:
        ConfigError: an unknown key, a wrong type, a missing value, a number out of range.
    """
    try:
        check_keys(config, [f.name for f in fields(Schema)], "")
    except ConfigError as error:
        raise _with_place(error, config) from None
    try:
        schema = to_dataclass(Schema, config, "")
    except ConfigError as error:
        raise _with_place(error, config) from None
    schema.phases.check("phases")
    schema.gradients.check("gradients")
    schema.run.check("run")
    if not 0 <= schema.seed < 1 << 63:
        raise ConfigError("seed", f"{schema.seed} is not between 0 and 2**63 - 1")
    for key, data in {"data.train": schema.data.train, "data.test": schema.data.test}.items():
        if data is not None:
            check_options(data, key)
    if schema.only is None and schema.weights != "best":
        raise ConfigError("weights", "says what only=test tests; it does nothing without it")
    return schema


def _with_place(error: ConfigError, config: dict[str, Any]) -> ConfigError:
    """For an unknown key that is right elsewhere: the error with the full path of that place."""
    text = str(error)
    if "there is no such key" not in text:
        return error
    last = error.key.split(".")[-1]
    places = [*_schema_paths(Schema, ""), *_config_paths(config, "")]
    right = [p for p in places if p.split(".")[-1] == last and p != error.key]
    if right:
        return ConfigError(error.key, f"there is no such key. Did you mean {right[0]!r}?")
    if "Did you mean" in text:
        return error
    close = nearest(last, {p.split(".")[-1] for p in places})
    return ConfigError(error.key, text.split(": ", 1)[1].replace("key.", f"key.{close}", 1))


def _schema_paths(cls: Any, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(cls).items():
        yield f"{prefix}{name}"
        for part in (hint, *get_args(hint)):
            if is_dataclass(part):
                yield from _schema_paths(part, f"{prefix}{name}.")


def _config_paths(config: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _config_paths(value, f"{prefix}{key}.")
