"""Schema: every key that a configuration may have. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from phaseloop.engine.config import places
from phaseloop.engine.config.processes import asked_for
from phaseloop.engine.config.typed import check_keys, to_dataclass
from phaseloop.engine.data.options import check_limit, check_options, check_weight
from phaseloop.engine.errors import ConfigError, nearest
from phaseloop.engine.phases import Phases
from phaseloop.engine.settings import Debug, Gradients, LossScale, Run
from phaseloop.engine.urls import check_url

Component = dict[str, Any]
"""``{name: REGISTERED, ...options}`` or ``{_target_: importable.thing, ...options}``."""


@dataclass
class TestSet:
    """A set of ``data.test``: in the dataset's order, and no sample left out but by ``limit``.

    See :class:`phaseloop.engine.data.source.Data`.
    """

    __test__ = False  # no tests in it, whatever pytest thinks of its name

    dataset: Component
    batch_size: int
    micro_batch_size: int | None = None
    accumulate: int | None = None
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    collate: Component | None = None
    limit: int | float | None = None
    to_device: Component | None = None


@dataclass
class MixSource:
    """A source of ``data.train.mix``. See :class:`phaseloop.engine.data.mix.Source`."""

    dataset: Component
    weight: float = 1.0
    limit: int | float | None = None


@dataclass
class TrainSet:
    """``data.train``: the same keys as a test set, and those of the training."""

    batch_size: int | dict[int, int]
    dataset: Component | None = None
    mix: dict[str, MixSource | None] | None = None
    epoch_samples: int | None = None
    sampler: Component | None = None
    limit: int | float | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    micro_batch_size: int | None = None
    accumulate: int | None = None
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    collate: Component | None = None
    batch_transform: Component | None = None
    augment: dict[str, Component | None] = field(default_factory=dict)
    views: int = 1
    to_device: Component | None = None
    rebuild_every: int | None = None


def one_or_several(value: Any) -> Any:
    """The type of ``data.test``: a mapping of mappings without a dataset is several sets."""
    several = isinstance(value, dict) and value and "dataset" not in value
    if several and all(item is None or isinstance(item, dict) for item in value.values()):
        return dict[str, TestSet | None]
    return TestSet | None


@dataclass
class DataSets:
    """``data``."""

    train: TrainSet | None = None
    test: TestSet | dict[str, TestSet | None] | None = field(
        default=None, metadata={"choose": one_or_several}
    )

    @property
    def tests(self) -> dict[str, TestSet]:
        """The test sets by name; one alone is called ``test``; those set to null are left out."""
        if self.test is None:
            return {}
        sets = self.test if isinstance(self.test, dict) else {"test": self.test}
        return {name: data for name, data in sets.items() if data is not None}

    @property
    def by_key(self) -> dict[str, TrainSet | TestSet]:
        """Every set by its place in the configuration."""
        train = {} if self.train is None else {"data.train": self.train}
        alone = isinstance(self.test, TestSet)
        tests = {"data.test" if alone else f"data.test.{n}": d for n, d in self.tests.items()}
        return {**train, **tests}


@dataclass
class StageData:
    """``phases.NAME.data``: the training data of one stage."""

    train: TrainSet | None = None


@dataclass
class StageSpec(Phases):
    """An entry of ``phases``, where that is a list. See :class:`phaseloop.engine.stages.Stage`."""

    name: str = ""
    repeat: int = 1
    data: StageData | None = None
    test_sets: list[str] | None = None
    train_step: Component | str | None = None
    schedule: Component | None = None
    freeze: list[str] = field(default_factory=list)


@dataclass
class PrecisionSpec:
    """``precision``, where more than its name is said."""

    name: Literal["float32", "bfloat16", "float16", "float64"]
    loss_scale: LossScale | None = None


def _one_stage_or_several(value: Any) -> Any:
    return list[StageSpec] if isinstance(value, list) else Phases


def _name_or_more(value: Any) -> Any:
    names = Literal["float32", "bfloat16", "float16", "float64"]
    return PrecisionSpec if isinstance(value, dict) else names


@dataclass
class Schema:
    """The root."""

    model: Component
    phases: Phases | list[StageSpec] = field(metadata={"choose": _one_stage_or_several})
    seed: int = 0
    imports: list[str] = field(default_factory=list)
    allow_targets: list[str] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    data: DataSets = field(default_factory=DataSets)
    criterion: Component | None = None
    meters: dict[str, dict[str, Component | None] | None] = field(default_factory=dict)
    optimizer: Component | None = None
    optimizers: dict[str, Component | None] = field(default_factory=dict)
    schedule: Component | None = None
    gradients: Gradients = field(default_factory=Gradients)
    precision: str | PrecisionSpec = field(default="float32", metadata={"choose": _name_or_more})
    train_step: Component | str = "standard"
    hooks: dict[str, Component | None] = field(default_factory=dict)
    backend: Component = field(default_factory=lambda: {"name": "auto"})
    launch: Component = field(default_factory=lambda: {"name": "local"})
    freeze: list[str] = field(default_factory=list)
    debug: Debug = field(default_factory=Debug)
    plan: bool = False
    only: Literal["test"] | None = None
    weights: str = "best"

    @property
    def stages(self) -> dict[str, StageSpec]:
        """The stages by their place in the configuration; none where there is but one."""
        given = [] if isinstance(self.phases, Phases) else self.phases
        return {f"phases.{stage.name or n}": stage for n, stage in enumerate(given)}

    @property
    def train_sets(self) -> dict[str, TrainSet]:
        """Every set of training data by its place in the configuration."""
        found = {} if self.data.train is None else {"data.train": self.data.train}
        for key, stage in self.stages.items():
            if stage.data is not None and stage.data.train is not None:
                found[f"{key}.data.train"] = stage.data.train
        return found


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
    _check_phases(schema)
    if schema.optimizer is not None and any(schema.optimizers.values()):
        raise ConfigError("optimizers", "give these or optimizer, not both; ~optimizer drops that")
    schema.gradients.check("gradients")
    initial = schema.model.get("weights")
    path = initial.get("path") if isinstance(initial, dict) else initial
    schema.run.check("run", others=[schema.weights, str(path)])
    check_url(schema.weights, "weights")
    if not 0 <= schema.seed < 1 << 63:
        raise ConfigError("seed", f"{schema.seed} is not between 0 and 2**63 - 1")
    schema.debug.check("debug")
    asked_for(schema.backend, address=places.job(schema.launch) is None)
    for key, data in schema.data.by_key.items():
        check_options(data, key)
    if "train" in schema.data.tests:
        raise ConfigError("data.test.train", "a test set may have any name but 'train'")
    for key, train in schema.train_sets.items():
        _check_train(train, key)
    try:
        check_keys(schema.meters, ["train", "test", *schema.data.tests], "meters")
    except ConfigError as error:
        raise _with_place(error, config) from None
    if schema.only is None and schema.weights != "best":
        raise ConfigError("weights", "says what only=test tests; it does nothing without it")
    return schema


def _check_phases(schema: Schema) -> None:
    if isinstance(schema.phases, Phases):
        schema.phases.check("phases")
        return
    if not schema.phases:
        raise ConfigError("phases", "the list of stages is empty")
    for key, stage in schema.stages.items():
        stage.check(key)
        if not stage.name:
            raise ConfigError(f"{key}.name", "give every stage a name")
    if len(schema.stages) < len(schema.phases):
        raise ConfigError("phases", f"two stages are called {_twice(schema.phases)!r}")


def _twice(stages: list[StageSpec]) -> str:
    names = [stage.name for stage in stages]
    return next(name for name in names if names.count(name) > 1)


def _check_train(data: TrainSet, key: str) -> None:
    """What of the training data excludes what."""
    if (data.dataset is None) == (data.mix is None):
        raise ConfigError(f"{key}.dataset", "give a dataset, or a mix of several, and not both")
    if data.mix is None:
        if data.epoch_samples is not None:
            raise ConfigError(f"{key}.epoch_samples", "it is the length of an epoch of a mix")
        if data.sampler is not None and data.shuffle is False:
            raise ConfigError(f"{key}.shuffle", f"{key}.sampler says which order it is")
        return
    if data.epoch_samples is not None and data.epoch_samples < 1:
        raise ConfigError(f"{key}.epoch_samples", f"{data.epoch_samples} is less than 1")
    if data.sampler is not None:
        raise ConfigError(f"{key}.sampler", "samples of a mix are drawn by its weights")
    if data.limit is not None:
        raise ConfigError(f"{key}.limit", f"give each source its own: {key}.mix.NAME.limit")
    sources = {name: source for name, source in data.mix.items() if source is not None}
    if not sources:
        raise ConfigError(f"{key}.mix", "there is no source in it")
    for name, source in sources.items():
        check_weight(source.weight, f"{key}.mix.{name}.weight")
        check_limit(source.limit, None, f"{key}.mix.{name}.limit")


def _with_place(error: ConfigError, config: dict[str, Any]) -> ConfigError:
    """For an unknown key that is right elsewhere: the error with the full path of that place."""
    text = str(error)
    if "there is no such key" not in text:
        return error
    last = error.key.split(".")[-1]
    found = [*_schema_paths(Schema, ""), *_config_paths(config, "")]
    places = [p for p in found if p != error.key and not p.startswith(f"{error.key}.")]
    right = [p for p in places if p.split(".")[-1] == last]
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
