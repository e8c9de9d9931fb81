"""Phases: how long a run is, when a test is due, and what is out of range."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloop import ConfigError, Phases, Progress
from phaseloop.engine.epoch_lengths import EpochLengths
from phaseloop.engine.phase_plan import PhasePlan


def walked(phases: Phases, windows: int, sets: int = 1, skip: set[int] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """What a run of this plan does: updates by number, ``e`` for an epoch's end, ``t`` for tests.

    Args:
        skip: windows, counted from 1 over the run, that move nothing.
    """
    plan = PhasePlan(phases, windows, [f"set{n}" for n in range(sets)])
    progress = Progress()
    done: list[str] = []
    number = 0

    def test() -> None:
        progress.tested_at = progress.updates
        done.append("t")

    while not plan.train_is_over(progress):
        progress.epoch += 1
        progress.windows = 0
        progress.epoch_open = True
        for window in range(windows):
            if plan.length_reached(progress):
                break
            number += 1
            progress.windows += 1
            if number in skip:
                done.append("-")
                continue
            progress.updates += 1
            done.append(str(progress.updates))
            if window < windows - 1 and plan.test_due_in_epoch(progress):
                test()
        progress.epoch_open = False
        done.append("e")
        if plan.test_due_at_epoch_end(progress):
            test()
    return done


def says(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    ("options", "windows", "expected"),
    [
        ({"epochs": 2}, 2, "1 2 e t 3 4 e t"),
        ({"epochs": 0}, 2, ""),
        ({"updates": 0}, 2, ""),
        ({"updates": 3}, 2, "1 2 e t 3 e t"),
        ({"updates": 4}, 2, "1 2 e t 3 4 e t"),
        ({"epochs": 3, "updates": 3}, 2, "1 2 e t 3 e t"),
        ({"epochs": 1, "updates": 9}, 2, "1 2 e t"),
        # Every second epoch, and after the last whatever its number.
        ({"epochs": 3, "test_every_epochs": 2}, 1, "1 e 2 e t 3 e t"),
        ({"epochs": 2, "test_every_epochs": 9}, 1, "1 e 2 e t"),
        ({"updates": 3, "test_every_epochs": 9}, 2, "1 2 e 3 e t"),
        # By updates: at an epoch's end the test comes after it, and never twice.
        ({"epochs": 2, "test_every_epochs": None, "test_every_updates": 2}, 2, "1 2 e t 3 4 e t"),
        (
            {"epochs": 2, "test_every_epochs": None, "test_every_updates": 2},
            3,
            "1 2 t 3 e 4 t 5 6 e t",
        ),
        ({"epochs": 1, "test_every_epochs": None, "test_every_updates": 2}, 3, "1 2 t 3 e t"),
        ({"epochs": 2, "test_every_updates": 2}, 3, "1 2 t 3 e t 4 t 5 6 e t"),
        ({"epochs": 1, "test_every_updates": 1}, 3, "1 t 2 t 3 e t"),
        # Never.
        ({"epochs": 2, "test_every_epochs": None}, 2, "1 2 e 3 4 e"),
    ],
)
def test_what_a_plan_does(options: dict[str, Any], windows: int, expected: str) -> None:
    assert walked(Phases(**options), windows) == says(expected)


def test_without_a_test_set_no_test_is_due() -> None:
    assert walked(Phases(epochs=2, test_every_updates=1), 2, sets=0) == says("1 2 e 3 4 e")


def test_without_training_data_there_is_nothing_to_train() -> None:
    assert walked(Phases(epochs=2), 0) == []
    assert PhasePlan(Phases(epochs=2), 0, ["test"]).updates == 0


def test_a_length_in_updates_counts_those_that_were_made() -> None:
    assert walked(Phases(updates=3), 2, skip={1, 3}) == says("- 1 e t - 2 e t 3 e t")


def test_a_length_in_epochs_does_not() -> None:
    assert walked(Phases(epochs=2), 2, skip={1, 3}) == says("- 1 e t - 2 e t")


def test_an_epoch_that_moved_nothing_is_not_tested_again() -> None:
    assert walked(Phases(epochs=2), 2, skip={3, 4}) == says("1 2 e t - - e")


@pytest.mark.parametrize(
    ("options", "windows", "updates", "epochs"),
    [
        ({"epochs": 3}, 10, 30, 3.0),
        ({"updates": 25}, 10, 25, 2.5),
        ({"epochs": 3, "updates": 25}, 10, 25, 2.5),
        ({"epochs": 2, "updates": 25}, 10, 20, 2.0),
    ],
)
def test_the_length_in_numbers(
    options: dict[str, Any], windows: int, updates: int, epochs: float
) -> None:
    plan = PhasePlan(Phases(**options), windows, [])
    assert (plan.updates, plan.epochs) == (updates, epochs)


@given(
    st.dictionaries(st.integers(2, 12), st.integers(1, 7), max_size=4),
    st.integers(1, 7),
    st.integers(0, 60),
)
def test_epochs_of_changing_lengths(later: dict[int, int], first: int, windows: int) -> None:
    """Against counting them one by one."""
    steps = {1: first, **later}
    lengths = EpochLengths(steps)
    each = [steps[max(e for e in steps if e <= epoch)] for epoch in range(1, 80)]
    assert [lengths.of(epoch) for epoch in range(1, 80)] == each
    assert [lengths.before(epoch) for epoch in range(1, 80)] == [sum(each[:n]) for n in range(79)]
    epochs, rest = lengths.split(windows)
    assert sum(each[:epochs]) + rest == windows
    assert 0 <= rest < each[epochs]
    plan = PhasePlan(Phases(updates=windows), steps, [])
    assert plan.updates == windows
    assert plan.epochs == pytest.approx(epochs + rest / each[epochs])
    assert PhasePlan(Phases(epochs=9), steps, []).updates == sum(each[:9])


def test_a_plan_of_changing_epochs_tests_at_their_ends() -> None:
    phases = Phases(epochs=3, test_every_updates=2)
    plan = PhasePlan(phases, {1: 3, 2: 1}, ["test"])
    assert plan.epoch_is_unfinished(Progress(epoch=1, windows=2))
    assert not plan.epoch_is_unfinished(Progress(epoch=1, windows=3))
    assert not plan.epoch_is_unfinished(Progress(epoch=2, windows=1))
    assert plan.updates == 5


@pytest.mark.parametrize(
    ("options", "epoch", "epoch_open", "updates", "below"),
    [
        ({}, 0, False, 0, False),
        ({"min_epochs": 2}, 1, False, 5, True),
        ({"min_epochs": 2}, 2, True, 9, True),  # the second epoch is not done
        ({"min_epochs": 2}, 2, False, 10, False),
        ({"min_updates": 5}, 1, True, 4, True),
        ({"min_updates": 5}, 1, True, 5, False),
        ({"min_epochs": 1, "min_updates": 8}, 1, False, 5, True),
    ],
)
def test_the_minimum(
    options: dict[str, int], epoch: int, epoch_open: bool, updates: int, below: bool
) -> None:
    plan = PhasePlan(Phases(epochs=9, **options), 5, [])
    progress = Progress(epoch=epoch, epoch_open=epoch_open, updates=updates)
    assert plan.below_minimum(progress) is below


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "epochs"),
        ({"epochs": -1}, "epochs"),
        ({"updates": -1}, "updates"),
        ({"epochs": 1, "min_epochs": -1}, "min_epochs"),
        ({"epochs": 1, "min_updates": -1}, "min_updates"),
        ({"epochs": 1, "test_every_epochs": 0}, "test_every_epochs"),
        ({"epochs": 1, "test_every_updates": 0}, "test_every_updates"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Phases(**options).check("stages.0")
    assert error.value.key == f"stages.0.{key}"


def test_progress_comes_back_as_it_was_and_shares_nothing() -> None:
    progress = Progress(updates=3, tests_due=["a"])
    state = progress.state_dict()
    again = Progress()
    again.load_state_dict(state)
    assert again == progress
    again.tests_due.append("b")
    assert progress.tests_due == ["a"]
    assert state["tests_due"] == ["a"]
