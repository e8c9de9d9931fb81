"""The plan's curves, lines and files: what every stage of a run will use, and where it is drawn."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Data, Phases, Run, Schedule, Stage, Task, Warmup
from phaseloop.engine.events import EVENTS, Dispatcher, Hook
from phaseloop.engine.schedules import constant, cosine, linear
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.tools import plan
from phaseloop.tools.planning import curves, pictures
from phaseloop.tools.planning.page import page, short
from phaseloop.tools.planning.plan import Plan, make
from phaseloop.tools.run import run
from tests.rigs import browser, cli, r1, ranks
from tests.rigs.probes import RecordingSGD
from tests.rigs.r0 import numbers, r0, train


def staged(folder: Path, *stages: Any) -> tuple[Task, RecordingSGD]:
    """10 samples in batches of 2: 5 updates an epoch."""
    made: list[RecordingSGD] = []

    def optimizer(parameters: Any, lr: float) -> RecordingSGD:
        made.append(RecordingSGD(parameters, lr=lr))
        return made[0]

    options = {"optimizer": optimizer, "schedule": Schedule(cosine()), "run": Run(str(folder))}
    return r0(range(10), 2, phases=list(stages), **options), made[0]


STAGES = (
    Stage(name="a", updates=7),
    Stage(name="b", epochs=1, repeat=2, schedule=Schedule(linear(), interval="epoch")),
    Stage(name="c", epochs=2, train=Data(numbers(range(6)), 2), schedule=Schedule(linear())),
)
UPDATES = 7 + 2 * 5 + 2 * 3


# --- the curves ---


@pytest.mark.parametrize("stages", [STAGES, STAGES[:1]], ids=["several", "one"])
def test_what_is_drawn_is_what_the_training_uses(tmp_path: Path, stages: Any) -> None:
    task, optimizer = staged(tmp_path / "run", *stages)
    train(task, learning_rate=LearningRate())
    planned, _ = staged(tmp_path / "plan", *stages)
    planned.build()
    drawn = curves.follow(planned)
    updates, rates = drawn.lines["optimizer", "lr", 0]
    assert len(optimizer.rates) == (UPDATES if len(stages) > 1 else 7)
    assert updates == list(range(1, len(optimizer.rates) + 1))
    assert [[rate] for rate in rates] == optimizer.rates
    assert drawn.borders == ([7, 12, 17] if len(stages) > 1 else [])


def drawn(task: Task) -> list[str]:
    task.build()
    return list(plan.draw(task, make(task, {})))


def test_a_stage_that_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    stages = (
        Stage(name="a", time="1m", schedule=Schedule(constant())),
        Stage(name="b", updates=3),
    )
    folder = tmp_path / "run"
    assert drawn(staged(folder, *stages)[0]) == [
        "",
        "schedules   not drawn for a, whose length is a time",
        f"schedules   {folder / 'plan.png'}",
        f"page        {folder / 'plan.html'}",
    ]
    assert (folder / "plan.png").stat().st_size > 0


def test_no_schedule_is_drawn_where_the_only_length_is_a_time(tmp_path: Path) -> None:
    task, _ = staged(tmp_path, Stage(time="1m", schedule=Schedule(constant())))
    assert drawn(task) == ["", f"page        {tmp_path / 'plan.html'}"]
    assert 'id="schedules"' not in (tmp_path / "plan.html").read_text()
    assert "its length is a time" in (tmp_path / "plan.html").read_text()


def test_one_length_of_all_is_drawn_whole(tmp_path: Path) -> None:
    """Of many updates, some: the first and the last always."""
    warmup = Warmup(start=0.0, updates=100)
    task = r0(range(1000), 1, phases=Phases(epochs=1), schedule=Schedule(linear(), warmup=warmup))
    task.build()
    found = curves.follow(task)
    updates, rates = found.lines["optimizer", "lr", 0]
    assert updates[0] == 1 and updates[-1] == 1000 and len(updates) == curves.POINTS + 1
    assert found.risen == [pytest.approx(100)]
    assert max(zip(rates, updates, strict=True))[1] in range(99, 104)


# --- the page ---


class _Parts(HTMLParser):
    """What a page asks for, and whether every tag that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        for name, value in attrs:
            outside = not (value or "").startswith("#")
            if name in ("src", "href", "xlink:href", "action", "data") and outside:
                self.asked.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class Quiet(Hook):
    """Says <nothing> & listens."""

    order = 7

    def on_step(self, task: Task) -> None: ...


def planned(tmp_path: Path) -> Plan:
    task = r1.make_task(
        tmp_path / "a<b>", test=True, epochs=3, config={"note": "</pre><script>alert(1)</script>"}
    )
    task.build()
    return make(task, {**r1.make_hooks(), "x<i>$y$": Quiet()})


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    made = planned(tmp_path)
    text = page(made)
    parts = _Parts()
    parts.feed(text)
    assert parts.open == [] and parts.asked == []
    assert not re.search(r"@import|url\((?!#)", text)
    for raw in ("<script", "x<i>", "a<b>", "<nothing>"):
        assert raw not in text
    for shown in ("a&lt;b&gt;", "x&lt;i&gt;$y$", "&lt;script&gt;", "Says &lt;nothing&gt; &amp;"):
        assert shown in text
    assert page(made) == text  # nothing in it depends on when it was made


def test_names_in_any_letters_are_drawn_without_a_warning(tmp_path: Path) -> None:
    """Chinese ones the font of matplotlib does not have."""
    made = dataclasses.replace(planned(tmp_path), name="实验")
    (span,) = made.spans
    made.spans[0] = dataclasses.replace(span, name="热身")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pictures.whole(made)
        assert "热身: 30 updates" in page(made)


def test_the_matrix_is_the_order_in_which_hooks_are_called(tmp_path: Path) -> None:
    """Of each row the cells, as numbers; of each column those from 1 on, once each."""
    made = planned(tmp_path)
    found = page(made)
    body = found[found.index('<table class="matrix">') :]
    rows = re.findall(r"<tr><td title=.*?</tr>", body, re.DOTALL)
    turns = [re.findall(r'<td class="turn">(?:<b>(\d+)</b>)?</td>', row) for row in rows]
    dispatcher = Dispatcher(made.hooks)
    names = list(dispatcher.hooks)
    columns = [event for event in EVENTS if dispatcher.listeners(event)]
    for number, event in enumerate(columns):
        order = {row[number]: names[n] for n, row in enumerate(turns) if row[number]}
        assert [order[str(turn + 1)] for turn in range(len(order))] == dispatcher.listeners(event)


@pytest.mark.parametrize(
    ("count", "said"), [(999, "999"), (16450, "16.4 k"), (1.2e6, "1.2 M"), (5e15, "5 P")]
)
def test_numbers_are_short(count: float, said: str) -> None:
    assert short(count) == said


@pytest.mark.browser
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    made = planned(tmp_path)
    file = tmp_path / "plan.html"
    file.write_text(page(made))
    with browser.opened(file.as_uri()) as driver:
        assert driver.get_log("browser") == []
        assert driver.find_element("css selector", "h1").text == "a<b>"
        # 40 samples in batches of 4, three times; the numbers stand before their words.
        assert driver.find_element("css selector", ".numbers").text.startswith("30\nupdates")
        for figure in driver.find_elements("css selector", "figure svg"):
            assert figure.size["height"] > 100
        marks = driver.find_elements("css selector", "#time svg use")
        assert len(marks) >= 3 + 3  # a test and a save after each epoch, beside the ticks
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= browser.WIDTH


# --- the command ---


def plan_tiny(folder: Path) -> int:
    os.chdir(folder)
    return run(["config=tiny", "plan=true", "schedule=cosine", "backend.processes=2"])


def test_of_several_processes_the_primary_prints_and_draws(tmp_path: Path) -> None:
    first, second = ranks.run(plan_tiny, cli.folder(tmp_path))
    assert (first.value, second.value) == (0, 0), first.output + second.output
    assert "training " in first.output
    assert "memory      at least " in first.output and "each of 2 processes" in first.output
    assert second.output == ""
    assert {path.name for path in (tmp_path / "runs/tiny").iterdir()} == {"plan.html", "plan.png"}
