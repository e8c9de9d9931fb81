"""The plan as one page of HTML: nothing is fetched, and no script is needed to read it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from string import Template

import yaml

from phaseloop.engine.model_summary import Row
from phaseloop.tools.planning import pictures
from phaseloop.tools.planning.memory import size
from phaseloop.tools.planning.plan import Plan

_HERE = Path(__file__).parent


def page(plan: Plan) -> str:
    """The whole page; all text of the run is escaped."""
    template = Template((_HERE / "page.html").read_text(encoding="utf-8"))
    memory = plan.memory
    each = f"of each of {memory.processes} processes, " if memory.processes > 1 else ""
    return template.substitute(
        name=escape(plan.name),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        numbers=_lines(_numbers(plan)),
        timeline=pictures.timeline(plan),
        besides="".join(f"<span>besides: {escape(text)}</span>" for text in plan.besides),
        facts=_lines(
            f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in plan.facts
        ),
        schedules=_section("schedules", "Schedules", _figure(pictures.schedules(plan))),
        memory_of=f"{each}on {escape(memory.device)}: at least {size(memory.total)}",
        stack=_lines(_stack(plan)),
        parts=_lines(_parts(plan)),
        unknown=_lines(f"<li>{escape(text)}</li>" for text in memory.unknown),
        modules=_lines(_modules(plan)),
        remarks=_lines(f'<p class="soft">{escape(line)}</p>' for line in plan.model.remarks()),
        events=_lines(
            f'<th class="event"><span>{escape(event)}</span></th>' for event in plan.calls
        ),
        calls=_lines(_calls(plan)),
        config=_section("config", "Configuration", _config(plan)),
    )


def _numbers(plan: Plan) -> Iterator[str]:
    total = plan.model.total
    updates = sum(span.stop - span.start for span in plan.spans)
    tests = sum(len(span.tests) for span in plan.spans)
    if updates:
        yield _number(f"{updates:,}", "updates")
    if tests:
        yield _number(f"{tests:,}", "tests" if tests > 1 else "test")
    yield _number(short(total.parameters), "parameters")
    if total.flops:
        yield _number(short(total.flops), "FLOPs of a sample, forward")
    yield _number(size(plan.memory.total), "of memory, at least")


def _number(value: str, what: str) -> str:
    return f"<li><b>{escape(value)}</b>{escape(what)}</li>"


def short(count: float) -> str:
    """``999``, ``16.4 k``, ``1.2 M``, ``3.4 G``."""
    units = ("", " k", " M", " G", " T", " P")
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:,.0f}" if not power else f"{count:.3g}{units[power]}"


def _stack(plan: Plan) -> Iterator[str]:
    for colour, part in zip(_colours(), plan.memory.parts, strict=False):
        label = escape(f"{part.name}: {size(part.bytes)}")
        yield f'<i style="flex:{part.bytes};background:{colour}" title="{label}"></i>'


def _parts(plan: Plan) -> Iterator[str]:
    for colour, part in zip(_colours(), plan.memory.parts, strict=False):
        dot = f'<span class="dot" style="background:{colour}"></span>'
        yield (
            f'<tr><td>{dot}{escape(part.name)}</td><td class="right">{size(part.bytes)}</td>'
            f'<td class="soft">{escape(part.note)}</td></tr>'
        )


def _colours() -> Iterator[str]:
    while True:
        yield from pictures.COLOURS


def _modules(plan: Plan) -> Iterator[str]:
    total = plan.model.total
    for row in plan.model.rows:
        depth = row.name.count(".") + 1 if row.name else 0
        name = f'<code style="padding-left:{1.2 * depth}em">{escape(row.name or "model")}</code>'
        trainable = _counted(row.trainable)
        if row.trainable < row.parameters:
            trainable = f'<span title="frozen in part or whole">{trainable} &#10052;</span>'
        flops = "-" if row.flops is None else _counted(row.flops)
        yield (
            f'<tr><td>{name}</td><td class="soft">{escape(row.kind)}</td>'
            f"<td {_bar(row, total.parameters, row.parameters)}>{_counted(row.parameters)}</td>"
            f'<td class="right">{trainable}</td>'
            f"<td {_bar(row, total.flops, row.flops, ' second')}>{flops}</td></tr>"
        )


def _counted(number: int) -> str:
    """Where there is nothing, the eye should not rest."""
    return f"{number:,}" if number else '<span class="soft">0</span>'


def _bar(row: Row, whole: int | None, part: int | None, kind: str = "") -> str:
    """Attributes of a cell whose background shows a share; the model itself has none."""
    if not row.name or not whole or not part:
        return 'class="right"'
    return f'class="right bar{kind}" style="--part:{100 * part / whole:.3g}%"'


def _calls(plan: Plan) -> Iterator[str]:
    for name, hook in plan.hooks.items():
        said = inspect.cleandoc(type(hook).__doc__ or "").partition("\n")[0]
        cells = "".join(_turn(names, name) for names in plan.calls.values())
        yield (
            f'<tr><td title="{escape(said)}"><code>{escape(name)}</code></td>'
            f'<td class="right soft">{hook.order}</td>{cells}</tr>'
        )


def _turn(names: list[str], name: str) -> str:
    turn = f"<b>{names.index(name) + 1}</b>" if name in names else ""
    return f'<td class="turn">{turn}</td>'


def _config(plan: Plan) -> str:
    if not plan.config:
        return ""
    text = yaml.safe_dump(dict(plan.config), sort_keys=False, allow_unicode=True)
    return f"<details><summary>all keys, as resolved</summary><pre>{escape(text)}</pre></details>"


def _section(name: str, title: str, inner: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>\n{inner}\n</section>' if inner else ""


def _figure(svg: str) -> str:
    return f"<figure>{svg}</figure>" if svg else ""


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
