"""A project of one's own: ``python -m phaseloop.tools.new NAME`` makes the folder NAME.

It holds a train step, a hook, a configuration and a test, and trains at once. The files come from
``new_project/`` beside this one, where the name stands as ``PROJECT``. Exit codes: 0 done; 1 an
error; 2 a name that cannot be one.
"""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from phaseloop.engine.config import compose as composing
from phaseloop.engine.errors import ConfigError
from phaseloop.tools.run import DONE, exit_code, words_given

USAGE = """\
usage: python -m phaseloop.tools.new NAME

  NAME      of a project: the folder NAME is made here, with a train step, a hook, a configuration
            and a test of your own; it trains at once, and its README.md says how to go on
"""

_TEMPLATES = Path(__file__).with_name("new_project")
_ENDING = ".template"
_NAME = "PROJECT"
_TAKEN = ("configs", "runs", "tests")
"""Folders beside the package of the project."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(run(words_given(arguments, lambda: USAGE)))


def run(words: Sequence[str]) -> int:
    """Make the project that the words name; the exit code."""
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("", f"give one name; got {' '.join(words)!r}")
    (name,) = words
    folder = Path(name)
    make(name, folder)
    print(f"made        {folder}: a train step, a hook, a configuration and a test")
    print(f"train       cd {name} && phaseloop config={name}")
    print(f"test        cd {name} && python -m pytest")
    print(f"go on       {folder / 'README.md'}")
    return DONE


def make(name: str, folder: Path) -> None:
    """Write a project.

    Args:
        name: of the project, its package and its experiment.
        folder: is made; there must be nothing of this name.

    Raises:
        ConfigError: the name cannot be one or is taken, or the folder exists.
    """
    check(name)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError("NAME", f"{folder} exists, and nothing is overwritten") from None
    try:
        for place, text in _files(name):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # made a moment ago, by us
        raise


def check(name: str) -> None:
    """Raises ConfigError for a name that the package, the experiment or pip could not have."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name):
        raise ConfigError(
            "NAME",
            f"{name!r} cannot be the name of a Python package: use letters, digits and _, "
            f"with a letter first and no _ last, such as my_project",
        )
    if _is_reserved(name):
        raise ConfigError("NAME", f"{name!r} is a word of Python's or of YAML's or Hydra's own")
    if name == _NAME or name.lower() in _TAKEN:
        raise ConfigError("NAME", f"{name!r} is the name of something in every project")
    if name in composing.experiments():
        raise ConfigError("NAME", f"config={name} exists already: it is an experiment that ships")
    if _is_module(name):
        raise ConfigError("NAME", f"there is a module {name!r} already, which would be hidden")


def _is_reserved(name: str) -> bool:
    (word,) = OverridesParser.create().parse_overrides([f"config={name}"])
    return keyword.iskeyword(name) or not yaml.safe_load(name) == word.value() == name


def _is_module(name: str) -> bool:
    """Whether something of this name is installed; the current folder and this one's are not."""
    beside = {Path.cwd(), Path(__file__).parent, Path(__file__).resolve().parent}
    places = [place for place in sys.path if place and Path(place) not in beside]
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, places) is not None


def _files(name: str) -> Iterator[tuple[str, str]]:
    """Place in the project, and text."""
    for file in sorted(_TEMPLATES.rglob(f"*{_ENDING}")):
        place = file.relative_to(_TEMPLATES).as_posix().removesuffix(_ENDING)
        place = ".gitignore" if place == "gitignore" else place.replace(_NAME, name)
        yield place, file.read_text(encoding="utf-8").replace(_NAME, name)


if __name__ == "__main__":
    main()
