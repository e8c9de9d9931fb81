"""Tools that work in one process say so where more are asked for, and leave everything alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloop.tools import export, find_lr, replay
from phaseloop.tools import run as program
from tests.rigs import cli

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # fmt: skip
SEVERAL = [
    ("backend.processes=2", "backend.processes: is 2"),
    ("backend.restarts=1", "backend.restarts: is 1"),
    ("launch=slurm", "launch: "),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(cli.folder(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("word", "said"), SEVERAL)
def test_a_range_test_refuses_more_than_one(
    here: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    assert find_lr.run(["config=tiny", word]) == 2
    assert f"wrong configuration: {said}" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_replay_refuses_more_than_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config=tiny", "phases={updates: 2}", "data.test=null"]
    assert program.run(words) == 0
    for word, said in [*SEVERAL[:2], ("launch.name=slurm", "launch: ")]:
        assert replay.run(["runs/tiny", "update=1", word]) == 2
        assert f"wrong configuration: {said}" in capsys.readouterr().err
    assert replay.run(["runs/tiny", "update=1", "backend.device=cpu"]) == 0


@pytest.mark.parametrize("tool", [find_lr, replay, export])
def test_a_launcher_that_started_several_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: object
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    words = {find_lr: ["config=tiny"], replay: ["runs/tiny"], export: ["runs/tiny", "a.pt"]}[tool]  # type: ignore[index]
    assert tool.run(words) == 2  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert "works in one process, and torchrun started 2: start it without torchrun" in said
