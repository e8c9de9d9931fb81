"""Panels: which curves are drawn together, in which order, and on which axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phaseloop.engine import rows
from phaseloop.tools.plotting.runs import LOG_POINTS, RATES, RunData, Series

MOST = 2000
"""Points of one curve that are drawn; of more the extremes of each stretch are kept."""


@dataclass
class Panel:
    """One picture.

    Attributes:
        name: of the metric.
        logarithmic: the y-axis is.
        faint: curves of log points are drawn thin, behind those of phase ends.
    """

    name: str
    logarithmic: bool = False
    faint: bool = False


def panels(runs: list[RunData]) -> list[Panel]:
    """Losses first, then metrics of phase ends, then what else was logged, the rates last."""
    found: dict[str, list[Series]] = {}
    for run in runs:
        for series in run.series:
            found.setdefault(series.panel, []).append(series)
    order = sorted(found, key=lambda name: _rank(name, found[name]))
    return [_panel(name, found[name]) for name in order]


def _rank(name: str, series: list[Series]) -> int:
    if rows.is_loss(name):
        return 0
    if name == RATES:
        return 3
    return 2 if all(one.kind == LOG_POINTS for one in series) else 1


def _panel(name: str, series: list[Series]) -> Panel:
    kinds = {one.kind for one in series}
    spans = rows.on_log_axis(name, (one.values for one in series))
    return Panel(name, spans, faint=len(kinds) > 1)


def thinned(values: list[float], most: int) -> list[int]:
    """Which points to draw of many: of each stretch the lowest and the highest, and both ends.

    Args:
        values: of a curve; what is not finite is a gap.
        most: so many points at the most; at least 5.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    buckets = (most - 2) // 3
    kept = {0, count - 1}
    for number in range(buckets):
        inside = range(number * count // buckets, (number + 1) * count // buckets)
        finite = [i for i in inside if math.isfinite(values[i])]
        if finite:
            kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
        if len(finite) < len(inside):  # a gap stays one
            kept.add(next(i for i in inside if not math.isfinite(values[i])))
    return sorted(kept)
