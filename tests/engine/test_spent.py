"""Spent: seconds of a run by part."""

from types import SimpleNamespace

import pytest

from phaseloop.engine import spent
from phaseloop.engine.spent import REST, SAVING, TESTING, TRAINING, WAITING, Spent


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for the test."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(spent, "time", clock)
    return clock


def test_each_second_is_in_one_part(clock):
    task = SimpleNamespace(writer=SimpleNamespace(stalled=0.0), waited=0.0)
    known = Spent()
    clock.now += 1
    known.begin(TRAINING, task)
    clock.now += 10
    task.writer.stalled += 2  # a save in the middle of the training
    task.waited += 3
    known.begin(TESTING, task)
    clock.now += 5
    known.begin(REST, task)
    clock.now += 4
    task.writer.stalled += 4  # and one between two phases
    known.begin(TRAINING, task)
    clock.now += 6
    task.waited += 1
    known.bring_up(task)
    assert known.seconds == {
        TRAINING: 10 - 2 + 6,
        TESTING: 5,
        SAVING: 2 + 4,
        WAITING: 3 + 1,
        REST: 1,
    }
    assert known.total == clock.now - 100
    known.bring_up(task)
    assert known.total == clock.now - 100


def test_what_was_spent_before_is_added(clock):
    task = SimpleNamespace(writer=SimpleNamespace(stalled=0.0), waited=0.0)
    known = Spent()
    known.begin(TRAINING, task)
    clock.now += 2
    known.bring_up(task)
    known.add({TRAINING: 40.0, WAITING: 5.0})
    assert (known.seconds[TRAINING], known.seconds[WAITING], known.total) == (42, 5, 42)
