"""The command line on XLA: digits, stopped by a signal, continued, tested and planned."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rigs import cli, equal

LIMIT = 300.0
DIGITS = ["config=digits", "backend=xla", "run.dir=runs/digits", "run.log_every=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which digits was stopped by SIGTERM and trained to its end."""
    place = tmp_path_factory.mktemp("digits")
    process = cli.start(DIGITS, place)
    rows = place / "runs" / "digits" / "metrics.jsonl"
    until = time.monotonic() + LIMIT
    while not (rows.exists() and rows.read_text().count("\n") > 60):  # in the third epoch
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 143, output
    status = json.loads((place / "runs/digits/status.json").read_text())
    assert status["status"] == "stopped"
    state = equal.state_of(equal.newest(place / "runs/digits"))
    assert state["progress"]["updates"] == status["updates"] > 50
    ended = cli.run(DIGITS, place, LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"update_{status['updates']:09d}" in ended.stdout  # continued from there
    return place


def test_digits_reaches_98_percent(place: Path) -> None:
    status = json.loads((place / "runs/digits/status.json").read_text())
    assert (status["status"], status["updates"]) == ("finished", 230)
    assert status["final"]["test/accuracy"] >= 0.98
    assert state_device(place) == "xla:CPU"


def state_device(place: Path) -> str:
    """What the newest checkpoint says of the machine that made it."""
    return str(equal.state_of(equal.newest(place / "runs/digits"))["environment"]["device"])


def test_a_finished_run_is_tested_alone(place: Path) -> None:
    ended = cli.run([*DIGITS, "only=test", "weights=best"], place, LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tested = json.loads((place / "runs/digits/test.json").read_text())
    status = json.loads((place / "runs/digits/status.json").read_text())
    assert f"{status['best']['test/accuracy']}" in json.dumps(tested)
    # torch_xla gives the root logger a handler of its own when it is imported.
    assert "INFO:phaseloop" not in ended.stdout + ended.stderr


def test_a_plan_is_printed(place: Path) -> None:
    ended = cli.run([*DIGITS[:2], "run.dir=runs/plan", "plan=true"], place, LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "16,450" in ended.stdout and "FLOPs" in ended.stdout


_READ = """
import sys, torch
for part in ("model.pt", "state.pt"):
    torch.load(sys.argv[1] + "/" + part, weights_only=True)
assert "torch_xla" not in sys.modules
"""


def test_a_checkpoint_is_read_without_torch_xla(place: Path) -> None:
    saved = equal.newest(place / "runs/digits")
    subprocess.run([sys.executable, "-c", _READ, str(saved.path)], check=True, timeout=LIMIT)
