"""A thousand processes and a billion samples, simulated: counts and bytes, and no times."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phaseloop.engine import agreement, marks
from tests.rigs import process

SAMPLES, RANKS, BATCH = 10**9, 1000, 65536


@pytest.fixture(scope="module")
def scale() -> Any:
    """The benchmark's functions, with fewer batches."""
    names = runpy.run_path(str(process.ROOT / "benchmarks" / "scale.py"))
    names["measure_data"].__globals__["BATCHES"] = 3
    return SimpleNamespace(**names)


@pytest.mark.parametrize("case", ["in order", "shuffled", "mix of three"])
def test_a_billion_samples_are_no_list(scale: Any, case: str) -> None:
    samples, options = scale.data_cases(SAMPLES, 1000)[case]
    assert samples >= SAMPLES - 2
    found = scale.alone(scale.measure_data, options, BATCH, RANKS)
    # One bit of each sample would be 119 MB.
    assert found["memory"] < 60


def test_samplers_by_labels_and_weights_need_some_bytes_for_each(scale: Any) -> None:
    for kind in scale.SAMPLERS:
        options = {"sampler": kind, "labelled": 10**6}
        found = scale.alone(scale.measure_data, options, BATCH, RANKS)
        assert found["memory"] * 2**20 / 10**6 < 48  # a Python int alone has 28, and 8 in a list


@pytest.mark.parametrize(
    ("samples", "batch_size"),
    [(SAMPLES, BATCH), (2**33 + 5, 4097), (2**31 + 1, 999), (70_000, BATCH), (5, 3)],
)
def test_shares_of_a_thousand_processes_have_no_gaps(
    scale: Any, samples: int, batch_size: int
) -> None:
    assert scale.shares(samples, batch_size, RANKS) == 0


def test_what_processes_have_of_their_own_in_a_checkpoint(scale: Any, tmp_path: Path) -> None:
    twenty = scale.alone(scale.measure_checkpoint, 20, tmp_path / "20")
    forty = scale.alone(scale.measure_checkpoint, 40, tmp_path / "40")
    own = twenty["own state"]
    assert own < scale.BARS["own state"]
    assert forty["manifest"] < 1
    more = (forty["state.pt"] - twenty["state.pt"]) * 1024  # kilobytes
    assert more == pytest.approx(20 * own, rel=0.01)
    assert forty["agreement, bytes"] == 8 * agreement._FIELDS


def test_sums_of_the_agreement_do_not_overflow() -> None:
    most = (marks._MARKS - 1) ** 2 * 1_000_000
    assert most < 2**63


def test_a_bar_that_is_missed_is_named(scale: Any) -> None:
    fine = {"memory": 1.0, "start": 1.0, "resume": 1.0, "batch first": 0.1, "batch middle": 0.1,
            "batch last": 0.1}  # fmt: skip
    missed: Callable[..., list[str]] = scale.missed
    assert missed("shuffled", SAMPLES, fine) == []
    assert missed("shuffled", SAMPLES, {**fine, "batch middle": 2.5}) == [
        "shuffled: batch is 2.50, more than 2"
    ]
    assert len(missed("shuffled", SAMPLES, {**fine, "memory": 201, "resume": 102})) == 2
    assert missed("mix of three", SAMPLES, {**fine, "batch last": 5.9}) == []
    assert missed("sampler weighted", 2**20, {**fine, "memory": 33.0}) == [
        "sampler weighted: bytes a sample is 33.00, more than 32"
    ]


def test_the_table(scale: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ["--ranks", "4", "--samples", "100000", "--labelled", "2000", "--batch-size", "64"]
    code = scale.main(words)
    shown = capsys.readouterr().out
    for case in scale.data_cases(1000, 1000):
        assert f"\n{case} " in shown
    assert ("more than" in shown) == (code == 1)
    assert list(tmp_path.iterdir()) == []
