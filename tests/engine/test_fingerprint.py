"""A dataset's fingerprint: a run does not go on with other data of the same length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phaseloop import ConfigError, Data, Mix
from phaseloop.engine.checkpoint.identity import facts_of_data
from phaseloop.engine.facts import fingerprint
from tests.rigs import r1


class Marked(r1.Samples):
    """R1's samples, with what tells them from others."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint


class Strange(r1.Samples):
    """Something else of this name."""

    def fingerprint(self) -> str:
        return "mine"


def facts(dataset: object) -> dict[str, object]:
    data = Data(dataset, 4)
    data.open(0, "data.train")
    return facts_of_data(data)


def test_it_is_part_of_what_a_run_is() -> None:
    assert facts(Marked("a"))["fingerprint"] == "a"
    assert facts(Mix({"one": Marked("a"), "two": r1.Samples()}))["mix"] == {
        "one": [1.0, r1.SAMPLES, None, "a"],
        "two": [1.0, r1.SAMPLES, None],
    }


def test_a_dataset_without_one_is_what_it_was() -> None:
    """Else no checkpoint of an earlier version could be resumed."""
    assert "fingerprint" not in facts(r1.Samples())
    assert fingerprint(Strange()) is None


def test_other_data_are_refused_on_a_resume(tmp_path: Path) -> None:
    def train(mark: str, epochs: int) -> dict[str, Any]:
        return r1.train(tmp_path, train=Data(Marked(mark), r1.BATCH), epochs=epochs)

    train("a", 1)
    train("a", 2)
    with pytest.raises(ConfigError, match=r"data\.fingerprint: 'a' -> 'b'"):
        train("b", 3)
