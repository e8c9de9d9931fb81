"""The page: one HTML file with the runs' tables, curves and all that draws them in it."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phaseloop.engine.report import counted, duration, number
from phaseloop.tools.plotting.compare import (
    NOT_THERE,
    Summary,
    differing,
    shared,
    summary,
    winners,
)
from phaseloop.tools.plotting.panels import Panel, panels, thinned
from phaseloop.tools.plotting.runs import LOG_POINTS, RunData, Series

MOST = 2000
"""Points of one curve in the page; of more the extremes of each stretch are kept."""

_HERE = Path(__file__).parent


def page(runs: list[RunData], names: list[str], colours: list[str]) -> str:
    """The whole page.

    Args:
        runs: at least one.
        names: of the runs, all different.
        colours: of the runs.
    """
    from plotly.offline import get_plotlyjs

    drawn = panels(runs)
    title = names[0] if len(runs) == 1 else counted(len(runs), "run")
    return _filled(
        title=html.escape(title),
        told=html.escape(_told(runs)),
        style=_file("page.css"),
        runs=_runs_table(runs, names, colours),
        panels="\n".join(_panel(number, panel, runs) for number, panel in enumerate(drawn)),
        config=_config(runs, names),
        data=_data(runs, names, colours, drawn),
        plotly=get_plotlyjs(),
        script=_file("page.js"),
    )


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _filled(**parts: str) -> str:
    """The template with its places filled; what is put in is not looked at again."""
    first, *rest = _file("page.html").split("{{")
    filled = [first]
    for piece in rest:
        name, _, text = piece.partition("}}")
        filled += [parts[name], text]
    return "".join(filled)


def _told(runs: list[RunData]) -> str:
    curves = [series for run in runs for series in run.series]
    longest = max((len(series.values) for series in curves), default=0)
    if not curves:
        return "No metrics yet."
    if longest > MOST:
        return f"Of curves with more than {MOST:,} points the extremes of each stretch are drawn."
    return ""


# --- the table of runs ---


def _runs_table(runs: list[RunData], names: list[str], colours: list[str]) -> str:
    summaries = [summary(run) for run in runs]
    metrics = list(dict.fromkeys(name for one in summaries for name in one.results))
    best = winners(runs, summaries)
    marked = [kind for kind in ("resume", "skip", "roll_back") if any(r.count(kind) for r in runs)]
    words = {"resume": "resumes", "skip": "skipped", "roll_back": "roll-backs"}
    heads = ["run", "updates", "epochs", "time", "samples/s", *(words[kind] for kind in marked)]
    lines = []
    for place, (run, told) in enumerate(zip(runs, summaries, strict=True)):
        cells = [
            _cell(f"{run.updates:,}", run.updates),
            _cell(f"{run.epoch:,}", run.epoch),
            _cell(duration(run.seconds), run.seconds),
            _cell(NOT_THERE if told.speed is None else f"{told.speed:,.0f}", told.speed),
            *(_cell(f"{run.count(kind):,}", run.count(kind)) for kind in marked),
            *(_result(told, name, best.get(name) == place) for name in metrics),
        ]
        lines.append(f"<tr>{_name(place, names[place], run, colours[place])}{''.join(cells)}</tr>")
    return _table([*heads, *metrics], lines, first="name")


def _name(place: int, name: str, run: RunData, colour: str) -> str:
    box = f'<input type="checkbox" value="{place}" checked aria-label="show {html.escape(name)}">'
    return (
        f'<th class="name" scope="row" data-value="{html.escape(name)}" '
        f'title="{html.escape(str(run.path))}"><label style="--run: {colour}">{box}'
        f'<span class="swatch"></span>{html.escape(name)}</label></th>'
    )


def _result(told: Summary, name: str, wins: bool) -> str:
    result = told.results.get(name)
    if result is None:
        return _cell(NOT_THERE, None)
    text = number(result.last)
    if result.best is not None:
        text += f' <span class="at">best {number(result.best)} at {result.best_at:,}</span>'
    value = result.last if result.best is None else result.best
    return _cell(text, value, "best" if wins else "")


def _cell(text: str, value: float | None, kind: str = "") -> str:
    """``text`` is HTML; ``value`` is what the column is sorted by."""
    sort = "" if value is None or not math.isfinite(value) else f"{value!r}"
    return f'<td data-value="{sort}"{f" class={kind}" if kind else ""}>{text}</td>'


def _table(heads: Iterable[str], lines: Iterable[str], first: str) -> str:
    cells = [
        f'<th scope="col"{f" class={first}" if not place else ""}>{html.escape(head)}</th>'
        for place, head in enumerate(heads)
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(cells)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


# --- the configuration ---


def _config(runs: list[RunData], names: list[str]) -> str:
    same = shared(runs)
    if not any(run.config for run in runs):
        return ""
    parts = []
    if len(runs) > 1:
        others = differing(runs)
        parts.append("<h2>What differs in the configuration</h2>")
        if others:
            lines = [_key(key, values) for key, values in others.items()]
            parts.append(_table(["key", *names], lines, first="name"))
        else:
            parts.append("<p>Nothing but where the runs lie.</p>")
    said = "the same in all" if len(runs) > 1 else "of the configuration"
    lines = [_key(key, [value]) for key, value in same.items()]
    parts.append(
        f"<details><summary>{counted(len(same), 'key')} {said}</summary>"
        f"{_table(['key', 'value'], lines, first='name')}</details>"
    )
    return "\n".join(parts)


def _key(key: str, values: list[str]) -> str:
    cells = "".join(f'<td title="{html.escape(v)}">{html.escape(v)}</td>' for v in values)
    return f'<tr><th class="name" scope="row">{html.escape(key)}</th>{cells}</tr>'


# --- the curves ---


def _panel(place: int, panel: Panel, runs: list[RunData]) -> str:
    return (
        f'<div class="panel"><h3>{html.escape(panel.name)}</h3>'
        f'<p class="key">{html.escape(_key_of(panel, runs))}</p>'
        f'<div class="plot" id="plot-{place}"></div></div>'
    )


def _key_of(panel: Panel, runs: list[RunData]) -> str:
    """Which line is which; colours are the runs', as in the table."""
    dashes = ("—", "– –", "···", "–·–", "— —")
    names = _phases(panel, runs) if panel.faint or _of_ends(panel, runs) else _labels(panel, runs)
    shown = [name for name in names if name]
    if panel.faint or len(shown) > 1:
        parts = [f"{dashes[i % len(dashes)]} {name}" for i, name in enumerate(names) if name]
        return " · ".join([*parts, *(["thin — log points of training"] if panel.faint else [])])
    return shown[0] if shown else ""


def _of(panel: Panel, runs: list[RunData]) -> list[Series]:
    return [one for run in runs for one in run.series if one.panel == panel.name]


def _of_ends(panel: Panel, runs: list[RunData]) -> bool:
    return any(one.kind != LOG_POINTS for one in _of(panel, runs))


def _phases(panel: Panel, runs: list[RunData]) -> list[str]:
    """Tests first: theirs is the solid line."""
    names = dict.fromkeys(one.phase for one in _of(panel, runs))
    return sorted(names, key=lambda name: (name == "train", name))


def _labels(panel: Panel, runs: list[RunData]) -> list[str]:
    return list(dict.fromkeys(one.label for one in _of(panel, runs)))


def _data(runs: list[RunData], names: list[str], colours: list[str], drawn: list[Panel]) -> str:
    content = {
        "panels": [
            {"name": panel.name, "logarithmic": panel.logarithmic, "faint": panel.faint,
             "phases": _phases(panel, runs), "labels": _labels(panel, runs)}
            for panel in drawn
        ],
        "runs": [
            {"name": name, "colour": colour, "seconds": round(run.seconds, 3),
             "series": [_curve(series) for series in run.series],
             "events": [{"kind": event.kind, "text": event.text, "update": event.update,
                         "samples": event.samples, "time": round(event.seconds, 3)}
                        for event in run.events]}
            for run, name, colour in zip(runs, names, colours, strict=True)
        ],
    }  # fmt: skip
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")  # so that no value can end the element


def _curve(series: Series) -> dict[str, Any]:
    kept = thinned(series.values, MOST)
    return {
        "panel": series.panel,
        "phase": series.phase,
        "kind": series.kind,
        "label": series.label,
        "update": [series.updates[i] for i in kept],
        "samples": [series.samples[i] for i in kept],
        "time": [series.seconds[i] for i in kept],
        "values": [v if math.isfinite(v := series.values[i]) else None for i in kept],
    }
