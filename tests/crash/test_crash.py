"""RES-o on the command line: killed, stopped, starved at random, and equal in the end.

A seeded dozen here; ``make test-crash`` runs hundreds (see ``__main__.py``).
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.crash import command, features, scenario
from tests.crash.__main__ import main
from tests.crash.scenario import play, scenarios
from tests.rigs import equal

pytestmark = pytest.mark.crash


def come_out_equal(given: dict[str, Any], true: bool = False) -> scenario.Result:
    with tempfile.TemporaryDirectory(prefix="phaseloop-crash-") as folder:
        result = play(Path(folder), given, true)
    shown = "\n  ".join(result.wrong)
    again = f"again: python -m tests.crash --again '{json.dumps(given)}'"
    assert not result.wrong, f"{shown}\n{again}"
    return result


@pytest.mark.parametrize("part", range(4))
def test_res_o_a_dozen_scenarios(part: int) -> None:
    """Three in each part; a part is a test of its own so that several processes share them."""

    @seed(part)
    @settings(
        max_examples=3, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    @given(scenarios(most=3))
    def three(given: dict[str, Any]) -> None:
        come_out_equal(given)

    three()


@pytest.mark.parametrize("part", range(3))
def test_res_o_on_two_processes(part: int) -> None:
    """One of them is disturbed, or both: the other ends by itself."""

    @seed(part)
    @settings(
        max_examples=1, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    @given(scenarios(3, processes=2))
    def one(given: dict[str, Any]) -> None:
        come_out_equal(given)

    one()


@pytest.mark.slow
def test_res_n_true_command_lines_on_two_processes() -> None:
    """Started by the launcher, which ends the others when one is killed, and is killed itself."""
    ends = [{"way": "kill", "at": 0.4, "rank": 1}, {"way": "kill", "at": 0.4, "rank": None},
            {"way": "SIGTERM", "at": 0.4, "rank": 1}]  # fmt: skip
    chosen = features.settled({"test": "epochs", "data": "stream", "every_updates": 1}, 2)
    come_out_equal({"features": chosen, "ends": ends, "processes": 2}, true=True)


def test_res_n_true_command_lines(tmp_path: Path) -> None:
    """Processes of their own from the beginning, as a user starts them."""
    ends = [
        {"way": "kill at an operation", "at": 0.3, "do": "kill_half"},
        {"way": "SIGTERM", "at": 0.6},
    ]
    come_out_equal({"features": features.settled({"test": "epochs"}), "ends": ends}, true=True)


def test_a_scenario_is_what_its_generator_makes_it() -> None:
    """So that a seed repeats it; and every feature and every way to end comes up."""
    first, second = (scenario.drawn(random.Random(7), 8) for _ in range(2))
    assert first == second
    several = [scenario.drawn(random.Random(number), 8, 2) for number in range(100)]
    ranks = {end["rank"] for one in several for end in one["ends"] if "rank" in end}
    assert ranks == {None, 0, 1}
    drawn = [scenario.drawn(random.Random(number), 8) for number in range(300)]
    assert {end["way"] for one in drawn for end in one["ends"]} == set(scenario.ENDS)
    for name, values in features.CHOICES.items():
        assert {one["features"][name] for one in drawn} == set(values), name


@pytest.mark.slow
def test_res_o_many_scenarios() -> None:
    """As many kills as ``CRASH_KILLS`` says, by default fifty."""
    assert main(["--kills", os.environ.get("CRASH_KILLS", "50")]) == 0


# --- the harness itself ---


def test_the_harness_sees_a_difference(tmp_path: Path) -> None:
    """Of two runs of which one has another seed, nearly everything differs."""
    given = features.config(features.settled({"test": "epochs", "average": "ema"}))
    for name, number in (("a", 0), ("b", 1)):
        folder = command.lay_out(tmp_path / name, {**given, "seed": number})
        assert command.run(folder)[0] == 0
    found = list(equal.differences(tmp_path / "a" / "run", tmp_path / "b" / "run"))
    places = {line.split(":")[0].split(".")[0].split(" ")[0] for line in found}
    assert places == {"model", "state", "status", "rows", "probe"}
    for part in ("optimizers", "averages", "rng", "metrics", "meters"):
        assert any(line.startswith(f"state.{part}") for line in found), part


def test_a_kill_is_a_kill(tmp_path: Path) -> None:
    """Every way to end ends a command line, when it comes in its middle."""
    plain = features.settled({"every_updates": 1, "test": "epochs"})
    whole = scenario.Undisturbed(tmp_path / "whole", plain)
    for way, more in scenario.ENDS.items():
        folder = command.lay_out(tmp_path / way.replace(" ", "_"), features.config(plain))
        end = {"way": way, "at": 0.5, **{name: values[0] for name, values in more.items()}}
        result = scenario.Result()
        over = scenario._broken_off(folder, whole, end, result, true=False)
        assert result.wrong == []
        assert over == (way == "short write"), way  # what is left of the bytes is written next
        assert result.kills == (way.startswith("kill")), way
