"""The probes as commands, on features that the step ``extract`` has written.

Exit codes: 0 done; 1 the features cannot be used; 2 wrong arguments.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phaseloop import ConfigError, DataError, Features, load_features

from .data import BANK, QUERY
from .functions import Labelled
from .meter import PROBES

USAGE = """\
usage: python -m phaseloop.recipes.probes PROBE FOLDER [QUERIES] [key=value ...]

  PROBE      linear, few_label or knn; all: each of them
  FOLDER     features of a set, as the step extract writes them: of the dataset probe_set, or of
             labelled samples to learn from
  QUERIES    the same, of the samples to ask about, where FOLDER is no probe_set
  key=value  options of the probe:
{options}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the words say, print the accuracies; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(_usage())
        return 0 if words else 2
    try:
        _run(words)
    except ConfigError as error:
        print(f"wrong arguments: {error}", file=sys.stderr)
        return 2
    except (DataError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _run(words: Sequence[str]) -> None:
    options = dict(word.split("=", 1) for word in words if _is_option(word))
    name, *folders = [word for word in words if not _is_option(word)]
    if name not in (*PROBES, "all"):
        raise ConfigError("PROBE", f"{name!r} is not one of {', '.join(PROBES)}, all")
    if not 1 <= len(folders) <= 2:
        raise ConfigError("FOLDER", f"give one folder, or that of the queries too; got {folders}")
    names = list(PROBES) if name == "all" else [name]
    probes = {each: _made(each, options, names) for each in names}
    bank, queries = parts(*(load_features(folder) for folder in folders))
    for each, probe in probes.items():
        accuracy = probe(bank, queries)
        print(f"{each:<10} {accuracy:.4f}  of {len(queries):,} queries, bank of {len(bank):,}")


def parts(first: Features, second: Features | None = None) -> tuple[Labelled, Labelled]:
    """Bank and queries, of one set that holds both or of two sets.

    Raises:
        DataError: targets are not what they have to be.
    """
    if second is not None:
        return _labelled(first), _labelled(second)
    targets = first.targets
    if targets is None or targets.dim() != 2 or targets.shape[1] != 3:
        shown = "none" if targets is None else list(targets.shape)
        raise DataError(
            f"its targets are {shown}, and not [N, 3] as those of a probe_set: give the folder of "
            f"the queries too"
        )
    bank, queries = (
        Labelled(first.features[targets[:, 1] == part], targets[targets[:, 1] == part, 0])
        for part in (BANK, QUERY)
    )
    return bank, queries


def _labelled(features: Features) -> Labelled:
    if features.targets is None:
        raise DataError(f"the set {features.about['set']} has no targets: a probe needs labels")
    return Labelled(features.features, features.targets)


def _is_option(word: str) -> bool:
    return "=" in word and not Path(word).exists()


def _made(name: str, given: Mapping[str, str], names: Sequence[str]) -> Any:
    """The probe with those of the options that are its own."""
    allowed = {field: kind for each in names for field, kind in _options(each).items()}
    for option in given:
        if option not in allowed:
            raise ConfigError(option, f"there is no such option. There are: {', '.join(allowed)}")
    own = {}
    for option, kind in _options(name).items():
        if option in given:
            try:
                own[option] = kind(given[option])
            except ValueError:
                raise ConfigError(option, f"{given[option]!r} is not {kind.__name__}") from None
    try:
        return PROBES[name](**own)
    except ValueError as error:
        raise ConfigError(name, str(error)) from None


def _options(name: str) -> dict[str, type]:
    """Names of a probe's options, and what they are: int or float."""
    return {field.name: type(field.default) for field in dataclasses.fields(PROBES[name])}


def _usage() -> str:
    lines = [
        f"             {name}: "
        + ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(PROBES[name]))
        for name in PROBES
    ]
    return USAGE.format(options="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
