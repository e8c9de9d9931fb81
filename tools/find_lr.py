"""Find a learning rate: ``python tools/find_lr.py config=NAME key=value ... find_lr.end=1``.

A learning-rate range test of an experiment: see :mod:`phaseloop.tools.range_test`. The run's
folder gets ``find_lr/find_lr.png`` and ``find_lr.json``, and is otherwise left alone. Exit codes
as those of ``tools/run.py``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from phaseloop.engine.config import compose as composing
from phaseloop.engine.config import schema as schemas
from phaseloop.engine.config.typed import to_dataclass
from phaseloop.engine.errors import ConfigError
from phaseloop.tools import one_process
from phaseloop.tools.range_files import NUMBERS, PICTURE
from phaseloop.tools.range_test import Found, RangeTest, find_lr
from phaseloop.tools.run import DONE, SIGNALLED, exit_code, words_given

__all__ = ["RangeTest", "find_lr"]

USAGE = """\
usage: python tools/find_lr.py config=NAME [key=value ...]

  config=NAME                the experiment; there are: {experiments}
  find_lr.start=1e-7         the rate of the first update
  find_lr.end=10             of the last
  find_lr.updates=100        how many
  find_lr.curve=linear       how the rate grows; default: exponential
  find_lr.smoothing=0.9      of the loss: 0 for none, less than 1
  find_lr.diverge=4          end when the smoothed loss is so many times its lowest value
  find_lr.dir=DIR            where picture and numbers go; default: find_lr in the run's folder
  optimizer.momentum=0.5     change any other key, as for tools/run.py
"""

_OWN = re.compile(r"^\+{0,2}(find_lr\..+=.*|find_lr=.*)$", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(run(words_given(arguments, _usage)))


def _usage() -> str:
    return USAGE.format(experiments=", ".join(composing.experiments()))


def run(words: Sequence[str]) -> int:
    """The range test that the words describe; the exit code."""
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(flags[0], "one range test is made at a time, and there are no flags")
    settings = _settings([match[1] for word in words if (match := _OWN.match(word))])
    composed = composing.compose([word for word in words if not _OWN.match(word)])
    schema = schemas.check(composed.config)
    _check(schema)
    run_dir = Path(schema.run.dir or Path("runs") / composed.name)
    settings.dir = settings.dir or str(run_dir / "find_lr")

    import phaseloop.hooks
    import phaseloop.train_steps  # noqa: F401 registers the steps
    from phaseloop.engine.config.build import build

    built = build(_training_only(schema))
    found = find_lr(lambda: built.task, settings, built.hooks)
    if found.signal is not None:
        return SIGNALLED + found.signal
    several = len(built.task.optimizers) > 1
    for line in _report(found, settings, several):
        print(line)
    return DONE


def _settings(words: Sequence[str]) -> RangeTest:
    """The settings from words such as ``find_lr.end=1``, read as Hydra reads them."""
    given: dict[str, Any] = {}
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except OverrideParseException as error:
            raise ConfigError(f"override {word!r}", f"cannot be read: {error}") from None
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(key, "several values; one range test is made at a time")
        if key == "find_lr":
            raise ConfigError(key, "give its keys one by one, such as find_lr.end=1")
        given[key.removeprefix("find_lr.")] = override.value()
    settings = to_dataclass(RangeTest, given, "find_lr")
    settings.check()
    return settings


def _check(schema: schemas.Schema) -> None:
    for key in ("plan", "only"):
        if getattr(schema, key):
            raise ConfigError(key, "is for tools/run.py; a range test trains, and a copy only")
    if schema.data.train is None:
        raise ConfigError("data.train", "a learning-rate range test needs training data")
    one_process.check_keys(schema, "a learning-rate range test")
    one_process.check_launcher("a learning-rate range test")


def _training_only(schema: schemas.Schema) -> schemas.Schema:
    """Without what the range test does not use, so that it is not opened or made."""
    return dataclasses.replace(
        schema,
        data=dataclasses.replace(schema.data, test=None),
        meters={},
        schedule=None,
        run=dataclasses.replace(schema.run, dir=None),
    )


def _report(found: Found, settings: RangeTest, several: bool) -> list[str]:
    assert settings.dir is not None
    lines = [
        f"tried       {len(found.rates)} updates, learning rates {settings.start:.3g} to "
        f"{found.rates[-1] if found.rates else settings.start:.3g}",
    ]
    if found.ended:
        lines.append(f"ended       {found.ended}")
    if found.suggestion is None:
        lines.append("suggestion  none: the loss did not fall; try other find_lr.start and end")
    else:
        lines.append(f"suggestion  {_override(found, several)}  (the steepest fall of the loss)")
    folder = Path(settings.dir)
    return [*lines, f"picture     {folder / PICTURE}", f"numbers     {folder / NUMBERS}"]


def _override(found: Found, several: bool) -> str:
    assert found.suggestion is not None
    if several:
        return f"{found.suggestion / found.base:.2g} times the rate of every optimizer"
    return f"optimizer.lr={found.suggestion:.2g}"


if __name__ == "__main__":
    main()
