"""A run in a real terminal: what one sees, Ctrl-C, and the same command again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.terminal import Session

EPOCH = 23
"""Updates: 1,438 samples in batches of 64."""
EPOCHS = 400  # longer than any test waits
UPDATES = EPOCHS * EPOCH
WORDS = ["config=digits", f"phases.epochs={EPOCHS}", "hooks.tensorboard=null", "hooks.curves=null"]
ANSWER = "stopping at the next border"


class Sessions:
    """Starts commands in one folder, and ends those that a failed test has left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Session] = []

    def start(self, *words: str, width: int = 80) -> Session:
        self._all.append(Session([*WORDS, *words], self._folder, width))
        return self._all[-1]

    def close(self) -> None:
        for session in self._all:
            session.close()


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    made = Sessions(tmp_path)
    yield made
    made.close()


def value_of(lines: list[str], label: str) -> str:
    """The text beside a label, which stands there once."""
    (line,) = [line for line in lines if line.startswith(f"{label}  ")]
    return line.removeprefix(label).strip()


def bar(lines: list[str]) -> int | None:
    """The update that the training's bar stands at; None: there is no bar."""
    found = [re.search(rf"━ +([\d,]+)/{UPDATES:,}", line) for line in lines]
    (match,) = [match for match in found if match] or [None]
    return None if match is None else int(match[1].replace(",", ""))


def past(update: int) -> object:
    """The bar stands behind this update, and the facts are below it."""
    return lambda lines: (
        (bar(lines) or 0) > update and re.match(r"loss .* samples/s  data wait", lines[-1])
    )


def test_the_bar_moves_ctrl_c_stops_and_the_same_command_goes_on(sessions: Sessions) -> None:
    first = sessions.start()
    lines = first.until(past(0))
    assert value_of(lines, "phases").startswith(f"{UPDATES:,} updates in {EPOCHS} epochs")
    seen = bar(lines)
    lines = first.until(past(seen))
    assert len(lines) - 1 == lines.index(next(x for x in lines if x.startswith("loss ")))
    first.interrupt()
    lines = first.end()
    assert first.code == 130
    assert not first.screen.cursor.hidden
    assert sum(ANSWER in line for line in lines) == 1
    assert bar(lines) is None and "^C" not in "\n".join(lines)
    stopped = int(re.match(r"([\d,]+) updates", value_of(lines, "stopped"))[1].replace(",", ""))
    assert stopped > seen
    assert value_of(lines, "reason") == "SIGINT"
    assert value_of(lines, "to go on") == f"the same command, from update {stopped:,}"

    second = sessions.start()
    lines = second.until(lambda lines: bar(lines) is not None)
    assert f"after update {stopped:,} of {UPDATES:,}" in value_of(lines, "resumed")
    assert bar(lines) >= stopped
    second.until(past(stopped))
    second.interrupt()
    second.interrupt()
    lines = second.end()
    assert second.code == 130
    assert not second.screen.cursor.hidden
    assert sum(ANSWER in line for line in lines) == 1
    assert bar(lines) is None


@pytest.mark.slow
def test_two_processes_say_everything_once(sessions: Sessions) -> None:
    session = sessions.start("backend=ddp", "backend.processes=2", width=100)
    lines = session.until(lambda lines: bar(lines) is not None and lines[-1].startswith("loss "))
    for label in ("model", "data", "phases", "machine", "run folder"):
        assert value_of(lines, label), label
    session.until(lambda lines: any(line.startswith("epoch   2/") for line in lines))
    session.interrupt()
    lines = session.end()
    assert session.code == 130
    assert sum(ANSWER in line for line in lines) == 1
    for label in ("stopped", "reason", "training", "to go on"):
        assert value_of(lines, label), label
    told = [line[:20] for line in lines if line.startswith("epoch ")]
    assert len(told) == len(set(told)) > 0
