"""Composing: from files and overrides to one plain mapping.

Hydra decides which files take part and in which order; they are merged here, on plain containers,
because Hydra's merge cannot know that a component which changes its ``name`` is another component:
keys that come only from lower layers would stay behind (an AdamW with the momentum of the SGD that
it replaced).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from hydra import initialize_config_dir
from hydra.core.default_element import GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phaseloop.engine.config.forms import without_other_form
from phaseloop.engine.errors import ConfigError, listing, nearest

PACKAGE_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MAIN = "main"
EXPERIMENTS = "config"
_KEY = re.compile(r"^(\+{0,2})([A-Za-z_][^=~\s]*?)=")


@dataclass(frozen=True)
class Composed:
    """A configuration as plain containers.

    Attributes:
        name: the experiment, as given by ``config=NAME``.
        config: everything, interpolations resolved.
        timed_folder: ``run.dir`` has the time of the start in it.
    """

    name: str
    config: dict[str, Any]
    timed_folder: bool


def compose(overrides: Sequence[str]) -> Composed:
    """The configuration for these overrides.

    ``./configs`` of the current folder is searched before the package's.

    Raises:
        ConfigError: whatever Hydra finds wrong with files or overrides, in our words.
    """
    here = Path.cwd() / "configs"
    first = here if here.is_dir() else PACKAGE_CONFIGS
    try:
        with initialize_config_dir(str(first), version_base="1.3", job_name="phaseloop"):
            loader: Any = GlobalHydra.instance().config_loader()
            if first != PACKAGE_CONFIGS:
                path = loader.get_search_path()
                path.append("phaseloop", f"file://{PACKAGE_CONFIGS}")
                loader.repository.initialize_sources(path)
            return _compose(loader, list(overrides))
    except OverrideParseException as error:
        raise ConfigError(
            f"override {error.override!r}", f"cannot be read: {_no_pair(error)}"
        ) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("", _first_line(error)) from None
    except RecursionError:
        raise ConfigError("defaults", "an experiment's defaults lead back to itself") from None
    except (yaml.YAMLError, ValueError) as error:  # a file that cannot be parsed
        raise ConfigError("", " ".join(str(error).split())) from None


def experiments() -> list[str]:
    """Names for ``config=NAME``: those of ``./configs`` and of the package."""
    folders = [Path.cwd() / "configs" / "config", PACKAGE_CONFIGS / "config"]
    files = [(folder, path) for folder in folders for path in folder.rglob("*.yaml")]
    return sorted({path.relative_to(folder).with_suffix("").as_posix() for folder, path in files})


def groups() -> list[str]:
    """Names of all groups of files, of ``./configs`` and of the package."""
    folders = [Path.cwd() / "configs", PACKAGE_CONFIGS]
    return sorted({p.name for f in folders if f.is_dir() for p in f.iterdir() if p.is_dir()})


def _no_pair(error: OverrideParseException) -> str:
    """What is wrong with a word that Hydra does not take for ``key=value``."""
    word = str(error.override)
    bare = word.lstrip("-")
    if word.startswith("-"):
        sign = "" if "=" in bare else "=VALUE"
        return f"keys have no dashes before them; say {bare}{sign}"
    if re.fullmatch(r"[\w.]+", word):
        return f"it has no value; say {word}=VALUE"
    return _first_line(error)


def normalize(overrides: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Overrides with one spelling each, so that ``+``, ``++`` and nothing mean the same.

    A key that is a group of files is chosen (``optimizer=adamw``); any other is set, whether it
    exists or not (``++optimizer.lr=0.1``): whether it may exist is checked later.
    """
    result = []
    for override in overrides:
        match = _KEY.match(override)
        if match is None or match[2].startswith("hydra"):
            result.append(override)
        elif match[2].split("@")[0] in groups:
            # Hydra takes no null for a group.
            none = override[match.end() :] == "null"
            result.append(f"~{match[2]}" if none else override[len(match[1]) :])
        else:
            result.append("++" + override[len(match[1]) :])
    return result


def merge(
    lower: Mapping[str, Any], higher: Mapping[str, Any], one_layer: bool = False
) -> dict[str, Any]:
    """``higher`` over ``lower``: mappings key by key, everything else replaced whole.

    A mapping whose ``name`` or ``_target_`` changes is another component: it starts empty, unless
    both are parts of one layer.
    """
    merged = {} if not one_layer and _is_another(lower, higher) else dict(lower)
    for key, value in higher.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(old, value, one_layer)
        elif _is_named_list(old) and isinstance(value, Mapping):
            merged[key] = _merge_named(key, old, value, one_layer)
        else:
            merged[key] = value
    return merged


def _is_named_list(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """A list of mappings that each have a name, such as the stages in ``phases``."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and "name" in item for item in value)
    )


def _merge_named(
    key: str, entries: Sequence[Mapping[str, Any]], changes: Mapping[str, Any], one_layer: bool
) -> list[Any]:
    """``phases.warm.epochs=2`` changes the entry called ``warm`` of a list."""
    names = [str(entry["name"]) for entry in entries]
    for name in changes:
        if name not in names:
            raise ConfigError(
                f"{key}.{name}",
                f"{key} is a list, and no entry of it is called {name!r}.{nearest(name, names)} "
                f"There are: {listing(names)}",
            )
    return [
        merge(entry, changes[name], one_layer) if isinstance(changes.get(name), Mapping) else entry
        for name, entry in zip(names, entries, strict=True)
    ]


def _compose(loader: Any, overrides: list[str]) -> Composed:
    overrides = normalize(overrides, groups())
    check_experiment(overrides)
    _check_sweeps(overrides)
    try:
        plan = loader.compute_defaults_list(MAIN, overrides, RunMode.RUN)
    except MissingConfigException as error:
        raise ConfigError("", _missing(error, loader)) from None
    except ConfigCompositionException as error:
        # What Hydra says when an experiment that is not global overrides a group.
        if found := re.match(rf"In '({EXPERIMENTS}/.*)': Could not override '.*@", str(error)):
            raise _lacks_header(found[1]) from None
        raise
    config: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for default in plan.defaults:
        if default.package == "hydra" or str(default.package).startswith("hydra."):
            continue
        config = _choose(config, chosen, loader, _choices_in_file(loader, default.config_path))
        layer = _load(loader, default.config_path)
        if "hydra" in layer and default.config_path != MAIN:
            raise _no_settings_of_hydra(default.config_path)
        package = default.package or ""
        if package.split(".")[0] == EXPERIMENTS:
            raise _lacks_header(default.config_path)
        config = _merge_layer(config, _embed(layer, package))
    config = _choose(config, chosen, loader, _choices_in_words(overrides))
    if any(override.lstrip("+~").startswith("hydra") for override in overrides):
        raise _no_settings_of_hydra("the command line")
    config = _apply(config, plan.config_overrides)
    config.pop("hydra", None)
    resolved = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    assert isinstance(resolved, dict)
    name = plan.overrides.known_choices["config"]
    timed = "${now:" in str((config.get("run") or {}).get("dir"))
    return Composed(str(name), {str(key): value for key, value in resolved.items()}, timed)


def _choose(
    config: dict[str, Any],
    chosen: dict[str, Any],
    loader: Any,
    choices: Iterable[tuple[str, Any]],
) -> dict[str, Any]:
    """Where a layer chooses another file for a group, take that file, whole.

    Hydra reads a group's file below all experiments, whoever chose it: so options that one
    experiment gave its SGD would end up in the AdamW that a higher layer chose.

    Args:
        chosen: group to the file in effect, None for none; brought up to date.
    """
    for group, choice in choices:
        if choice is None:
            config = {**config, group: None}
        elif chosen.get(group) != choice:
            config = {**config, group: _load(loader, f"{group}/{choice}")}
        chosen[group] = choice
    return config


def _choices_in_file(loader: Any, path: str) -> Iterator[tuple[str, Any]]:
    for default in loader.repository.load_config(path).defaults_list:
        if isinstance(default, GroupDefault) and default.is_override():
            yield str(default.group).lstrip("/"), default.value


def _choices_in_words(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    own = [group for group in groups() if group != EXPERIMENTS]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        choice = override.value()
        if override.key_or_group in own and (choice is None or isinstance(choice, str)):
            yield override.key_or_group, choice


def _merge_layer(config: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """A misspelt hook cannot be switched off: found here, since a null has no options to check."""
    on, changes = config.get("hooks"), layer.get("hooks")
    if isinstance(on, Mapping) and isinstance(changes, Mapping):
        for name, options in changes.items():
            if options is None and name not in on and (hint := nearest(str(name), on)):
                raise ConfigError(f"hooks.{name}", f"no hook of that name is on.{hint}")
    return merge(without_other_form(config, layer), layer)


def check_experiment(overrides: Sequence[str]) -> None:
    """Raises ConfigError, with the names there are, where no experiment is chosen or none such.

    Hydra's own message lists search paths.
    """
    chosen = [o.split("=", 1)[1] for o in overrides if o.startswith("config=")]
    known = experiments()
    if not chosen:
        raise ConfigError("config", f"choose one: config=NAME. There are: {listing(known)}")
    if chosen[-1] not in known:
        raise ConfigError(
            "config",
            f"no experiment is called {chosen[-1]!r}.{nearest(chosen[-1], known)} "
            f"There are: {listing(known)}",
        )


def _check_sweeps(overrides: Sequence[str]) -> None:
    """Where it does not run a sweep, Hydra leaves the override out without a word."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise ConfigError(
                override.key_or_group,
                f"{override.get_value_string()} is several values; add --multirun for a run each, "
                f"or quote it",
            )


def _missing(error: MissingConfigException, loader: Any) -> str:
    """A group has no such file: name the nearest and all there are."""
    missing = error.missing_cfg_file or ""
    group, _, name = missing.rpartition("/")
    options = loader.repository.get_group_options(group) if group else []
    if not options:
        return _first_line(error)
    return f"{group}: there is no {name!r}.{nearest(name, options)} There are: {listing(options)}"


def _no_settings_of_hydra(place: str) -> ConfigError:
    """Hydra makes whatever class its settings name; and a run of ours does not use them."""
    return ConfigError(
        "hydra", f"Hydra's own settings are for the command line with --multirun, not for {place}"
    )


def _lacks_header(path: str) -> ConfigError:
    return ConfigError(
        f"configs/{path}.yaml", "an experiment's first line must be '# @package _global_'"
    )


def _load(loader: Any, path: str) -> dict[str, Any]:
    found = loader.repository.load_config(path)
    layer = OmegaConf.to_container(found.config, resolve=False)
    if not isinstance(layer, dict):
        raise ConfigError(path, "the file must hold a mapping")
    layer.pop("defaults", None)
    return {str(key): value for key, value in layer.items()}


def _embed(layer: dict[str, Any], package: str) -> dict[str, Any]:
    for part in reversed(package.split(".") if package else []):
        layer = {part: layer}
    return layer


def _apply(config: dict[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """The words of a command line are one layer: their order among themselves says nothing."""
    layer: dict[str, Any] = {}
    for override in overrides:
        path = override.key_or_group.split(".")
        if override.is_delete():
            config = _without(_merge_layer(config, layer), path, override.key_or_group)
            layer = {}
        else:
            word = _embed({path[-1]: _plain(override.value())}, ".".join(path[:-1]))
            layer = merge(layer, word, one_layer=True)
    return _merge_layer(config, layer)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def _without(config: Mapping[str, Any], path: Sequence[str], whole: str) -> dict[str, Any]:
    if path[0] not in config:
        raise ConfigError(whole, f"there is nothing to delete.{nearest(path[0], config)}")
    rest = dict(config)
    if len(path) == 1:
        del rest[path[0]]
    elif isinstance(rest[path[0]], Mapping):
        rest[path[0]] = _without(rest[path[0]], path[1:], whole)
    else:
        raise ConfigError(whole, f"{path[0]} is no mapping: there is nothing to delete in it")
    return rest


def _is_another(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> bool:
    """``higher`` names another component than ``lower`` does."""
    if "_target_" in higher:
        return ("_target_" in lower or "name" in lower) and (
            lower.get("_target_") != higher["_target_"]
        )
    if "name" in higher:
        return "_target_" in lower or lower.get("name", higher["name"]) != higher["name"]
    return False


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
