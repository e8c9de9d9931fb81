"""Pictures: the panels of the page as PNG files, by update, for papers and messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from phaseloop.tools.plotting.panels import Panel, panels
from phaseloop.tools.plotting.runs import LOG_POINTS, RunData, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", "--", ":", "-.")
_FEW = 40
_NAMED = 12
"""So many runs are named in a picture's legend; more would hide the curves."""


def save(runs: list[RunData], names: list[str], colours: list[str], folder: Path) -> list[Path]:
    """A file for each panel, called by it: ``loss.png``; their paths."""
    found: dict[Path, Panel] = {}
    for panel in panels(runs):
        stem = re.sub(r"[^\w.-]+", "_", panel.name).strip("_.") or "panel"
        path = folder / f"{stem}.png"
        while path in found:  # names that differ in signs that a file's cannot have
            path = path.with_stem(f"{path.stem}_")
        found[path] = panel
    for path, panel in found.items():
        _save(panel, runs, names, colours, path)
    return list(found)


def _save(
    panel: Panel, runs: list[RunData], names: list[str], colours: list[str], path: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for run, name, colour in zip(runs, names, colours, strict=True):
        own = [one for one in run.series if one.panel == panel.name]
        _draw(axes, own, panel, name, colour)
    if panel.logarithmic:
        axes.set_yscale("log")
    axes.set_title(panel.name, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("update")
    axes.grid(True, color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(runs) <= _NAMED and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _draw(axes: Axes, series: list[Series], panel: Panel, name: str, colour: str) -> None:
    """Curves of one run in one panel; of several phases each has its own dashes."""
    kinds = sorted({(one.phase == "train", one.phase, one.label) for one in series})
    for one in series:
        thin = panel.faint and one.kind == LOG_POINTS
        number = kinds.index((one.phase == "train", one.phase, one.label))
        told = [name, *([one.phase] if panel.faint or one.kind != LOG_POINTS else []), one.label]
        axes.plot(
            one.updates,
            one.values,
            color=colour,
            alpha=0.35 if thin else 1,
            linewidth=1 if thin else 1.7,
            linestyle="-" if thin else _DASHES[number % len(_DASHES)],
            marker="o" if one.kind != LOG_POINTS and len(one.values) <= _FEW else None,
            markersize=3,
            label=None if thin else ", ".join(filter(None, told)),
        )
