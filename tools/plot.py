"""Compare runs: ``python tools/plot.py RUN [RUN ...] [out=FOLDER]`` makes one page of them.

``plot.html`` has everything in it and needs no network; each of its panels is a PNG beside it. Only
``metrics.jsonl`` and ``resolved.yaml`` of a run are read, so it may be of another machine, or still
going. Exit codes: 0 done, 1 an error, 2 wrong words.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from phaseloop.engine import disk
from phaseloop.engine.errors import ConfigError
from phaseloop.tools.plotting import compare, pictures, runs
from phaseloop.tools.plotting.colours import colours
from phaseloop.tools.plotting.page import page
from phaseloop.tools.run import DONE, exit_code, words_given

USAGE = """\
usage: python tools/plot.py RUN [RUN ...] [out=FOLDER]

  RUN          the folder of a run, such as runs/digits; or one that holds runs: all of them
  out=FOLDER   where plot.html and the PNGs go; default: the folder "plot" in the run's, or in the
               one that holds all of them
"""

PAGE = "plot.html"

_WORD = re.compile(r"^(\w+)=(.*)$", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(run(words_given(arguments, lambda: USAGE)))


def run(words: Sequence[str]) -> int:
    """Make the page of the runs that the words name; the exit code."""
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    given, out = _read(words)
    found = runs.find(given)
    folder = Path(out) if out is not None else _common(found) / "plot"
    read = [runs.read(path) for path in found]
    names, shades = compare.labels(found), colours(len(found))
    text = page(read, names, shades)
    disk.make_folder(folder)
    disk.replace(folder / PAGE, lambda file: file.write(text.encode()))
    drawn = pictures.save(read, names, shades, folder)
    for run_, name in zip(read, names, strict=True):
        if not run_.series:
            print(f"no metrics  {name}: it has not come to its first log point")
    print(f"runs        {len(read)}")
    print(f"page        {folder / PAGE}")
    if drawn:
        print(f"pictures    {', '.join(path.name for path in drawn)}")
    return DONE


def _read(words: Sequence[str]) -> tuple[list[Path], str | None]:
    """The folders, and where the page goes."""
    out: str | None = None
    given = []
    for word in words:
        match = _WORD.match(word)
        if match is None or Path(word).is_dir():
            given.append(Path(word))
        elif match[1] != "out":
            raise ConfigError(match[1], "there is no such word; allowed: out=FOLDER, and folders")
        elif not match[2]:
            raise ConfigError("out", "needs a folder, such as out=runs/plot")
        else:
            out = match[2]
    if flags := [str(path) for path in given if str(path).startswith("-")]:
        raise ConfigError(flags[0], "there are no flags; give folders of runs, and out=FOLDER")
    if not given:
        raise ConfigError("RUN", "give the folder of a run, such as runs/digits, or several")
    return given, out


def _common(paths: list[Path]) -> Path:
    """The folder that all of them are in; of one run its own."""
    if len(paths) == 1:
        return paths[0]
    return Path(os.path.commonpath([path.resolve() for path in paths]))


if __name__ == "__main__":
    main()
