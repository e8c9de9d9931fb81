"""Train an experiment with several seeds: ``python tools/seeds.py config=NAME seeds=0,1,2 ...``.

One after the other, each in a process of its own, and then a table of what came out: mean, smallest
and largest of every metric, and the processor time of a run. Seeds that have finished are not
trained again; one that was interrupted goes on. Exit codes as those of ``tools/run.py``.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phaseloop.engine import disk
from phaseloop.engine.config import compose as composing
from phaseloop.engine.config import schema as schemas
from phaseloop.engine.errors import ConfigError
from phaseloop.tools.run import DONE, exit_code, words_given

USAGE = """\
usage: python tools/seeds.py config=NAME [seeds=0,1,2] [key=value ...]

  config=NAME       the experiment; there are: {experiments}
  seeds=0,1,2       which seeds (0,1,2)
  run.dir=DIR       where the runs go: DIR/seed_0, ... (runs/NAME-seeds)
  key=value         change any other key, as for tools/run.py
"""

RESULT = "seed_{}.json"
"""In the folder of all runs, for each seed: what it was trained with, and what it came to."""

_SEEDS = re.compile(r"^seeds=(.*)$")
_OURS = ("run.dir", "plan", "only")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(run(words_given(arguments, _usage)))


def _usage() -> str:
    return USAGE.format(experiments=", ".join(composing.experiments()))


def run(words: Sequence[str]) -> int:
    """Train what the words describe, with each seed; the exit code."""
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    given = [match[1] for word in words if (match := _SEEDS.match(word))]
    rest = [word for word in words if not _SEEDS.match(word)]
    seeds = _numbers(given[-1] if given else "0,1,2")
    for word in rest:
        if _key(word) == "seed":
            raise ConfigError("seed", f"say which by seeds={word.partition('=')[2]}")
    composed = composing.compose(rest)
    schema = schemas.check(composed.config)
    if schema.plan or schema.only:
        raise ConfigError("plan" if schema.plan else "only", "seeds are for training")
    folder = Path(schema.run.dir or f"runs/{composed.name}-seeds")
    passed_on = [word for word in rest if _key(word) not in _OURS]
    results = []
    for seed in seeds:
        code, result = _one(passed_on, folder, seed)
        if result is None:
            print(f"seed {seed} did not finish: exit code {code}; the others are not tried")
            return code
        results.append(result)
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["final"].items())
        print(f"seed {seed}  {metrics}  {_shown(result['cpu'])} CPU s", flush=True)
    print()
    print("\n".join(table(results)))
    return DONE


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise ConfigError("seeds", f"{text!r} is not whole numbers with commas, as 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise ConfigError("seeds", f"{text!r} has one of them twice")
    return seeds


def _one(words: Sequence[str], folder: Path, seed: int) -> tuple[int, dict[str, Any] | None]:
    """Exit code and result of one seed: ``final`` by metric, ``cpu`` in seconds or None."""
    path = folder / RESULT.format(seed)
    line = " ".join(words)
    fresh: dict[str, Any] = {"words": line, "cpu": 0.0}
    before = json.loads(path.read_text()) if path.exists() else fresh
    if before["words"] != line:
        raise ConfigError(
            "run.dir", f"{path} is of other words: {before['words']!r}; take another folder"
        )
    if "final" in before:
        return DONE, before
    program = Path(__file__).with_name("run.py")
    place = f"run.dir={_quoted(str(folder / f'seed_{seed}'))}"
    command = [sys.executable, str(program), *words, f"seed={seed}", place]
    # Where this process does not come to write the time that was spent, nobody knows it.
    _write(path, {**before, "cpu": None})
    spent = _spent()
    code = subprocess.run(command, check=False).returncode
    result = dict(before)
    if before["cpu"] is not None:
        result["cpu"] = before["cpu"] + _spent() - spent
    status = folder / f"seed_{seed}" / "status.json"
    if code == DONE and status.exists():
        result["final"] = json.loads(status.read_text())["final"]
    _write(path, result)
    return code, result if "final" in result else None


def _write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    disk.replace(path, lambda file: file.write(text.encode()))


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _quoted(text: str) -> str:
    """A text as Hydra's grammar takes it whatever is in it.

    Backslashes are themselves in a quoted text, but before a quote.
    """
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), text)
    return f"'{escaped}'"


def _spent() -> float:
    """Processor time of all that this process has started and that has ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table: for each metric its mean, smallest and largest over the runs."""
    names = dict.fromkeys(name for result in results for name in result["final"])
    columns = {
        name: [result["final"][name] for result in results if name in result["final"]]
        for name in names
    }
    columns["CPU seconds"] = [one["cpu"] for one in results if one["cpu"] is not None]
    lines = ["| metric | mean | smallest | largest |", "| --- | --- | --- | --- |"]
    for name, values in columns.items():
        mean = sum(values) / len(values) if values else None
        shown = map(_shown, (mean, min(values, default=None), max(values, default=None)))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
