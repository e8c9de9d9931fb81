"""What a command that starts processes writes into its run's folder, and knows it again by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phaseloop.engine.run_folder import COMMAND, RunFolder
from phaseloop.tools import launching


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(COMMAND, "mine")
    return RunFolder(tmp_path)


def said(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder.path / "status.json").read_text())
    return found


def test_the_cause_of_a_failure_is_the_reason(folder: RunFolder) -> None:
    folder.write_status({"status": "failed", "reason": "another process has failed", "updates": 3})
    launching.tell_in(folder, "rank 1: ValueError: no")
    status = said(folder)
    assert (status["reason"], status["updates"]) == ("rank 1: ValueError: no", 3)


@pytest.mark.parametrize(
    ("status", "command"), [("finished", "mine"), ("running", "mine"), ("failed", "another's")]
)
def test_no_other_status_is_touched(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, status: str, command: str
) -> None:
    monkeypatch.setenv(COMMAND, command)
    folder.write_status({"status": status, "reason": "its own"})
    monkeypatch.setenv(COMMAND, "mine")
    before = said(folder)
    launching.tell_in(folder, "rank 1: ValueError: no")
    assert said(folder) == before


def test_there_may_be_no_folder(folder: RunFolder, tmp_path: Path) -> None:
    launching.tell_in(RunFolder(tmp_path / "none"), "rank 1: ValueError: no")
    assert not (tmp_path / "none").exists()


def test_a_command_knows_its_run_again_whatever_clocks_say(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not launching.started_again(folder.path)  # nothing is there
    monkeypatch.setenv(COMMAND, "an old one")
    folder.write_status({"status": "running"})
    folder.write_config({})
    monkeypatch.setenv(COMMAND, "mine")
    assert not launching.started_again(folder.path)  # though written this very second
    folder.write_status({"status": "running"})
    assert launching.started_again(folder.path)


def test_a_word_for_each_command_and_one_for_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    first, second = (launching.environment("")[COMMAND] for _ in range(2))
    assert first != second
    monkeypatch.setenv(COMMAND, first)  # as in a job that was queued again
    assert launching.environment("")[COMMAND] == first
