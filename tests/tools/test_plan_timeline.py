"""The plan's time line against the run itself: every test and every save, at its update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phaseloop import Data, Hook, Stage, Task, TensorData
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.tools.planning import timeline
from tests.rigs import r1, streams
from tests.rigs.r0 import numbers, r0, train


class Watch(Hook):
    """Notes the updates at which train phases end, tests begin, and checkpoints are written."""

    only_watches = True

    def __init__(self) -> None:
        self.borders: list[int] = []
        self.tests: list[int] = []
        self.saves: list[int] = []

    def on_start(self, task: Task) -> None:
        task.before_save.append(lambda task: self.saves.append(task.progress.updates))

    def on_phase_start(self, task: Task) -> None:
        if not task.train:
            self.tests.append(task.progress.updates)

    def on_phase_end(self, task: Task) -> None:
        if task.train:
            self.borders.append(task.progress.updates)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "every epoch": ({"epochs": 3}, {}),
    "every second epoch": ({"epochs": 5, "test_every_epochs": 2}, {"every_epochs": 2}),
    "parts of an epoch": ({"epochs": 2, "test_every_epochs": 0.3}, {"every_updates": 4}),
    "more than an epoch": ({"epochs": 5, "test_every_epochs": 1.5}, {"every_epochs": None}),
    "updates": (
        {"updates": 25, "test_every_updates": 7, "test_every_epochs": None},
        {"every_updates": 6, "every_epochs": None},
    ),
    "both, from the start": (
        {"epochs": 2.5, "test_every_updates": 5, "test_at_start": True},
        {"every_epochs": 1},
    ),
    "from the start, saved by updates": (
        {"epochs": 1, "test_at_start": True},
        {"every_epochs": None, "every_updates": 3},
    ),
    "never": ({"epochs": 2, "test_every_epochs": None}, {}),
    "stages": (
        [
            Stage(name="a", updates=13, test_every_updates=4),
            Stage(name="b", epochs=1.5, repeat=2, test_every_epochs=0.5, test_at_start=True),
            Stage(name="c", epochs=2, train=Data(r1.Samples(10), 4)),
        ],
        {"every_updates": 5, "every_epochs": 2},
    ),
}


def make(folder: Path, phases: Any) -> Task:
    stages = phases if isinstance(phases, list) else [Stage(**phases)]
    return r1.make_task(folder, test=True, phases=stages)


@pytest.mark.parametrize(("phases", "saves"), CASES.values(), ids=CASES)
def test_the_time_line_is_what_the_run_does(tmp_path: Path, phases: Any, saves: Any) -> None:
    watch = Watch()
    train(make(tmp_path / "run", phases), watch=watch, checkpoint=Checkpoint(**saves))
    planned = make(tmp_path / "plan", phases)
    planned.build()
    spans = timeline.spans(planned, {"checkpoint": Checkpoint(**saves)})
    assert [at for span in spans for at in span.borders] == watch.borders
    assert [at for span in spans for at in span.tests] == watch.tests
    # Of the same update there are two, before its test and after it.
    assert sorted({at for span in spans for at in span.saves}) == sorted(set(watch.saves))
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]


def test_stages_have_their_names_and_epochs(tmp_path: Path) -> None:
    """10 updates an epoch; epoch 2 is cut short by the 13 updates of a, and b begins with 3."""
    planned = make(tmp_path, CASES["stages"][0])
    planned.build()
    spans = timeline.spans(planned, {})
    assert [span.name for span in spans] == ["a", "b 1/2", "b 2/2", "c"]
    assert [span.epochs for span in spans] == [(1, 1.3), (3, 1.5), (5, 1.5), (7, 2.0)]
    assert [span.saves for span in spans] == [[], [], [], []]  # no hook, no save


def test_what_nobody_knows_is_said(tmp_path: Path) -> None:
    stages = [Stage(name="a", time="1m", test_every_time="10s"), Stage(name="b", epochs=1)]
    planned = make(tmp_path, stages)
    planned.build()
    hook = Checkpoint(every_minutes=2, keep_best=1, metric="test/accuracy")
    first, second = timeline.spans(planned, {"checkpoint": hook})
    assert first.open == "its length is a time" and first.tests == []
    assert (second.start, second.stop, second.open) == (0, 10, "")
    assert timeline.not_drawn(planned, {"checkpoint": hook}) == [
        "a test every 10s",
        "a save after each test that is among the best",
        "a save every 2 minutes",
    ]


def test_a_stream_of_unknown_length_tests_by_updates(tmp_path: Path) -> None:
    data = Data(streams.Stream(), 4)
    stage = Stage(updates=7, test_every_updates=3, test_every_epochs=None)
    planned = r1.make_task(None, train=data, test=True, phases=[stage])
    planned.build()
    (span,) = timeline.spans(planned, {})
    assert (span.tests, span.borders) == ([3, 6, 7], [7])


def test_places_beyond_count_are_not_listed() -> None:
    """A test after each of so many updates, and one more."""
    samples = TensorData(numbers([0.0]).tensors[0].expand(timeline.MOST + 1))
    test = Data(numbers([1]), 1)
    phases = Stage(epochs=1, test_every_updates=1)
    task = r0([0], 1, train=Data(samples, 1), test=test, phases=phases)
    task.build()
    (span,) = timeline.spans(task, {})
    assert span.crowded and span.tests == [] and span.stop == timeline.MOST + 1
