"""Several runs side by side: what they are called, what they were told, what came out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phaseloop.tools.plotting.runs import RunData

_OF_THE_FOLDER = ("run.dir", "run.checkpoints")
"""Keys that say where a run lies: they differ always, and say nothing."""

NOT_THERE = "–"


def labels(paths: list[Path]) -> list[str]:
    """A name for each folder: the end of its path that tells it from the others.

    Args:
        paths: different folders.
    """
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def differing(runs: list[RunData]) -> dict[str, list[str]]:
    """By key of the configuration, the value in each run, where they are not all the same."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    texts = {key: [_text(run.config, key) for run in runs] for key in keys}
    return {
        key: values
        for key, values in texts.items()
        if len(set(values)) > 1 and key not in _OF_THE_FOLDER
    }


def shared(runs: list[RunData]) -> dict[str, str]:
    """By key, the value that all runs have."""
    others = differing(runs)
    first = runs[0].config
    return {
        key: _text(first, key) for key in first if key not in others and key not in _OF_THE_FOLDER
    }


def _text(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return NOT_THERE
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@dataclass
class Result:
    """One metric of one run.

    Attributes:
        last: its last value; NaN where the run has none.
        best: its best value; None where nobody says which is better.
        best_at: the update of the best value.
    """

    last: float = math.nan
    best: float | None = None
    best_at: int | None = None


@dataclass
class Summary:
    """What the table says of a run.

    Attributes:
        results: by metric.
        speed: training samples per second; None where it is not known.
    """

    results: dict[str, Result] = field(default_factory=dict)
    speed: float | None = None


def summary(run: RunData) -> Summary:
    """What came out of a run. A NaN is never best."""
    results = {}
    for name, series in run.metrics().items():
        higher = run.higher.get(name)
        result = results[name] = Result(last=series.values[-1])
        numbers = [(v, u) for v, u in zip(series.values, series.updates, strict=True) if v == v]
        if higher is None or not numbers:
            continue
        pick = max if higher else min
        best = pick(value for value, _ in numbers)
        result.best, result.best_at = best, next(u for value, u in numbers if value == best)
    return Summary(results, run.speed())


def winners(runs: list[RunData], summaries: list[Summary]) -> dict[str, int]:
    """By metric, which run has the best value of all; none where fewer than two have one."""
    found = {}
    for name in dict.fromkeys(name for one in summaries for name in one.results):
        values = [
            (best, number)
            for number, one in enumerate(summaries)
            if name in one.results and (best := one.results[name].best) is not None
        ]
        if len(values) > 1:
            higher = next(run.higher[name] for run in runs if name in run.higher)
            best = max(values)[0] if higher else min(values)[0]
            found[name] = next(number for value, number in values if value == best)
    return found
