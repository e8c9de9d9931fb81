"""``python -m tests.crash``: as many kills as one likes, two at a time, and a table of them.

``--kills`` says how many, ``--seed`` which, ``--processes`` on how many processes a training runs;
``--again JSON`` repeats one scenario, as a failure prints it. ``make test-crash`` is this with 300
kills, and 30 more on two processes. Kills by the clock fall where they fall: repeated, they may
miss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.crash.scenario import Result, play, scenarios

PARTS = ("features", "ends", "processes")
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when nothing differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-a-time", type=int, default=2, help="scenarios at a time")
    parser.add_argument("--processes", type=int, default=1, help="of each training")
    parser.add_argument("--again", metavar="JSON", help="one scenario, as a failure prints it")
    parser.add_argument("--part", metavar="FILE", help=argparse.SUPPRESS)
    words = parser.parse_args(arguments)
    if words.again:
        return _again(json.loads(words.again))
    if words.part:
        _part(words.kills, words.seed, words.processes, Path(words.part))
        return 0
    return _all(words.kills, words.seed, words.at_a_time, words.processes)


def _again(scenario: dict[str, Any]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="phaseloop-crash-"))
    result = play(folder, scenario)
    print(f"{sum(result.ends.values())} ended early, {result.kills} of them by kill; {folder}")
    print("\n".join(result.wrong) or "no difference")
    return int(bool(result.wrong))


def _all(kills: int, first_seed: int, at_a_time: int, processes: int) -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(at_a_time)]
        # Each part takes an equal share, the first ones what does not divide.
        shares = [kills // at_a_time + (n < kills % at_a_time) for n in range(at_a_time)]
        parts = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.crash", "--part", str(file), "--kills", str(share),
                 "--seed", str(first_seed * 1000 + number), "--processes", str(processes)],
                cwd=ROOT,
            )
            for number, (file, share) in enumerate(zip(files, shares, strict=True))
        ]  # fmt: skip
        try:
            codes = [part.wait() for part in parts]
        except KeyboardInterrupt:  # what is done so far
            codes = [part.wait() for part in parts if part.terminate() is None]
        found = [line for file in files if file.exists() for line in _lines(file)]
    return _table(found, time.monotonic() - started) or int(any(codes))


def _part(kills: int, first_seed: int, processes: int, file: Path) -> None:
    """Scenarios until so many kills are made; a line of JSON for each."""
    made, parent = 0, os.getppid()

    @seed(first_seed)
    @settings(
        max_examples=100 * kills + 100, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scenarios(8, processes))
    def scenario_by_scenario(scenario: dict[str, Any]) -> None:
        nonlocal made
        if made >= kills or os.getppid() != parent:
            return
        with tempfile.TemporaryDirectory(prefix="phaseloop-crash-") as folder:
            try:
                result = play(Path(folder), scenario)
            except Exception as error:
                result = Result(wrong=[f"{type(error).__name__}: {error}"])
        made += result.kills
        line = {**scenario, "kills": result.kills, "inside": result.inside,
                "by": result.ends, "wrong": result.wrong}  # fmt: skip
        with open(file, "a") as out:
            out.write(json.dumps(line) + "\n")
        if result.wrong:
            print(_failure(line), flush=True)

    scenario_by_scenario()


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _failure(line: dict[str, Any]) -> str:
    scenario = json.dumps({name: line[name] for name in PARTS if name in line})
    shown = "\n  ".join(line["wrong"])
    return f"DIFFERENT:\n  {shown}\nagain: python -m tests.crash --again '{scenario}'\n"


def _table(found: list[dict[str, Any]], seconds: float) -> int:
    """Print what was done; 1 when something differs."""
    ends: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for line in found:
        ends.update(line["by"])
        used.update(f"{name}: {value}" for name, value in line["features"].items())
    wrong = [line for line in found if line["wrong"]]
    print(f"\n{len(found)} scenarios in {seconds:.0f} s\n\nfeatures")
    names = dict.fromkeys(name for line in found for name in line["features"])
    for name in names:
        values = sorted((k.split(": ")[1], n) for k, n in used.items() if k.startswith(f"{name}: "))
        print(f"  {name:14} {'  '.join(f'{value} {count}' for value, count in values)}")
    print("\nended early")
    for way, count in sorted(ends.items()):
        print(f"  {way:26} {count:5}")
    kills, inside = (sum(line[name] for line in found) for name in ("kills", "inside"))
    print(f"  {'all':26} {sum(ends.values()):5}")
    print(f"\nkills         {kills}\ninside a save {inside}\ndifferences   {len(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
