"""Hook ``curves``: a picture of losses, metrics and learning rates at the end of a run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseloop.engine import rows
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger("phaseloop")

# By (phase, what it is): updates and values.
Series = dict[tuple[str, str], tuple[list[int], list[float]]]

_LR = "learning rate"
_SHARES = "metrics"
_RAW = "log points"
_COLOURS = ("#2a6fbb", "#d1602f", "#3a8f5c", "#8a5aa8", "#b8912a", "#5d6b78")
_FAINT = "#a9c6e4"
_DASHES = ("-", "--", ":", "-.")


@register_hook("curves", default=True)
class Curves(Hook):
    """Draws from the rows of ``metrics.jsonl``, so over all interruptions of the run.

    A panel for the loss, one for metrics between 0 and 1, one for each other metric, one for the
    learning rate; the x-axis is the number of updates. Without rows there is no picture.

    Args:
        file: name of the picture in the run's folder.
        rows: name of the file that hook ``metrics_file`` writes.
    """

    order = Order.LOG - 1  # the console's summary, which comes later, tells where the picture is
    only_watches = True

    def __init__(self, file: str = "curves.png", rows: str = "metrics.jsonl") -> None:
        self.file = file
        self.rows = rows

    def on_end(self, task: Task, outcome: Outcome) -> None:
        if task.folder is None or not task.primary:
            return
        # After these time is short, and the last checkpoint has still to be written.
        if outcome.signal in (signal.SIGTERM, signal.SIGHUP):
            return
        root = Path(task.folder.path)
        try:
            panels = read_panels(root / self.rows)
            if panels:
                _save(draw(panels), root / self.file)
        except Exception as error:  # a picture is no reason for a finished run to fail
            log.warning("hooks.curves: no picture: %s: %s", type(error).__name__, error)


def read_panels(path: Path) -> dict[str, Series]:
    """What each panel shows: losses first, then metrics, the learning rate last.

    Empty when the file is missing or has no rows. Values that are no numbers, which the file
    holds as text, become NaN: gaps in the curve.
    """
    found: dict[str, Series] = {}
    for row in rows.read(path):
        if "event" in row:
            continue
        for name, value in row.items():
            place = _place(name, row["phase"])
            if place is not None:
                panel, key = place
                updates, values = found.setdefault(panel, {}).setdefault(key, ([], []))
                updates.append(row["update"])
                values.append(float(value))
    losses = {name: found.pop(name) for name in sorted(found) if rows.is_loss(name)}
    rates = {_LR: found.pop(_LR)} if _LR in found else {}
    return {**losses, **_merge_shares(found), **rates}


def draw(panels: Mapping[str, Series]) -> Figure:
    """The panels side by side, at most three in a row; a phase has one colour in all of them."""
    from matplotlib.figure import Figure

    found = {phase for name, series in panels.items() if name != _LR for phase, _ in series}
    phases = sorted(found, key=lambda phase: (phase != TRAIN, phase))
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.3 * lines), dpi=140, layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True).flat)
    for ax, (name, series) in zip(axes, panels.items(), strict=False):
        if name == _LR:
            _draw_rates(ax, series)
        else:
            _draw_metrics(ax, series, phases)
        _finish(ax, name, series)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    return figure


def _place(name: str, phase: str) -> tuple[str, tuple[str, str]] | None:
    """Panel and key of a value in a row of ``phase``; None: it is not drawn."""
    if rows.is_rate(name):
        return _LR, (_LR, name)
    if rows.is_loss(name):  # without its phase's name: of a log point
        return name, (phase, _RAW)
    if name.startswith(f"{phase}/"):
        return name.removeprefix(f"{phase}/"), (phase, "")
    return None


def _merge_shares(panels: dict[str, Series]) -> dict[str, Series]:
    """Metrics that are shares, between 0 and 1, go into one panel when there are several."""
    shares = {
        name: series
        for name, series in panels.items()
        if all(0 <= v <= 1 for _, values in series.values() for v in values if v == v)
    }
    if len(shares) < 2:
        return panels
    merged = {
        (phase, name): points
        for name, series in shares.items()
        for (phase, _), points in series.items()
    }
    return {_SHARES: merged, **{n: s for n, s in panels.items() if n not in shares}}


def _draw_metrics(ax: Axes, series: Series, phases: list[str]) -> None:
    kinds = list(dict.fromkeys(kind for _, kind in series if kind != _RAW))
    for phase, kind in sorted(series, key=lambda key: (phases.index(key[0]), key[1])):
        updates, values = series[phase, kind]
        colour = _COLOURS[phases.index(phase) % len(_COLOURS)]
        style: dict[str, Any] = {"color": colour, "linewidth": 1.6}
        if kind == _RAW:
            if (phase, "") in series:
                style = {"color": _FAINT, "linewidth": 1, "zorder": 1}
        else:
            style["linestyle"] = _DASHES[kinds.index(kind) % len(_DASHES)]
            if len(updates) <= 40:
                style.update(marker="o", markersize=3)
        ax.plot(updates, values, label=_label(phase, kind), **style)


def _label(phase: str, kind: str) -> str:
    return f"{phase}, {kind}" if kind == _RAW else f"{phase} {kind}".strip()


def _draw_rates(ax: Axes, series: Series) -> None:
    for number, ((_, name), (updates, values)) in enumerate(series.items()):
        colour = "#444444" if len(series) == 1 else _COLOURS[number % len(_COLOURS)]
        ax.plot(updates, values, label=name, color=colour, linewidth=1.6)


def _finish(ax: Axes, name: str, series: Series) -> None:
    if rows.on_log_axis(name, (values for _, values in series.values())):
        ax.set_yscale("log")
    ax.set_title(name, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel("update", fontsize=9)
    ax.tick_params(labelsize=8, labelbottom=True)
    ax.grid(True, color="#e6e9ec", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if len(series) <= 12 and (name != _LR or len(series) > 1):
        ax.legend(fontsize=8, frameon=False)


def _save(figure: Figure, path: Path) -> None:
    """By renaming, so that an older picture stands until the new one is whole."""
    temporary = path.with_name(f".{path.name}.new")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
