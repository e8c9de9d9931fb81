"""LOG: the files of lines and TensorBoard have each update once, however often a run is killed."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Hook, Order
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import equal, process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, reference, undisturbed
from tests.rigs.r1 import At

KILLED = -signal.SIGKILL


def go(folder: Path, at: At | None = None, **options: Any) -> process.Ended:
    """One process of the run in ``folder``, broken off by ``at``, or to its end."""
    hooks = {**options.pop("hooks", {}), **({} if at is None else {"at": at})}
    return process.run(r1.train, folder, probe_of(folder), hooks=hooks, **options)


def finish(folder: Path, **options: Any) -> None:
    ended = go(folder, **options)
    assert ended.code == 0, ended.output


def loss_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of log points, with their times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.parametrize("half_a_line", [b"", b'{"phase": "train", "upd', b"\n\n\x00"])
def test_log_a_each_update_once(tmp_path: Path, half_a_line: bytes) -> None:
    options: dict[str, Any] = {"epochs": 2, "save": {"every_updates": 10}}
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 14), **options).code == KILLED
    assert [row["update"] for row in loss_rows(folder)] == list(range(1, 15))
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(half_a_line)
    killed = time.time()
    finish(folder, **options)

    rows = loss_rows(folder)
    assert [row["update"] for row in rows] == list(range(1, 21))
    assert [row["time"] >= round(killed, 3) for row in rows] == [False] * 10 + [True] * 10
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize("at", [10, 12])
def test_log_a_rows_over_several_updates(tmp_path: Path, at: int) -> None:
    """What was measured since the last log point is in the checkpoint: no row is cut in two, and
    nothing is in two rows."""
    options: dict[str, Any] = {"epochs": 2, "run": {"log_every": 4}, "save": {"every_updates": at},
                               "test": True, "hooks": {"skip": r1.SkipSome()}}  # fmt: skip
    folder = tmp_path / "run"
    assert go(folder, At("on_step", at), **options).code == KILLED
    finish(folder, **options)
    rows = equal.rows(folder)
    assert rows == equal.rows(undisturbed(**options))
    # 20 windows, of which four are skipped.
    assert [row["update"] for row in rows if "loss" in row] == [4, 8, 12, 16]
    skips = [(row["event"], row["update"]) for row in rows if "event" in row]
    assert skips == [("skip", update) for update in (3, 6, 8 + 3, 8 + 6)]
    assert_eq(undisturbed(**options), folder)


BETWEEN = Order.CHECKPOINT - 1
"""After what writes rows, before the checkpoint."""


@pytest.mark.parametrize(
    "at",
    [
        At("on_step", 15, order=BETWEEN),
        At("on_phase_end", 10, order=BETWEEN),
        At("on_phase_end", 10, phase="test", order=BETWEEN),
        At("on_phase_end", 15, phase="test"),
        At("on_step", 15, phase="test", position=1),
        At("on_step", 15, signal.SIGTERM, phase="test", position=1),
        At("on_phase_end", 15, signal.SIGTERM, phase="test", order=BETWEEN),
    ],
    ids=lambda at: f"{at.event}-{at.phase}-{at.action}",
)
def test_log_a_killed_between_a_row_and_the_checkpoint(tmp_path: Path, at: At) -> None:
    options: dict[str, Any] = {"epochs": 2, "test": True, "phases": {"test_every_updates": 5},
                               "save": {"every_updates": 5, "every_epochs": 9}}  # fmt: skip
    folder = tmp_path / "run"
    assert go(folder, at, **options).code in (0, KILLED)
    finish(folder, **options)
    assert equal.rows(folder) == equal.rows(reference(**options))
    assert_eq(undisturbed(**options), folder)


def test_log_a_killed_after_a_stop(tmp_path: Path) -> None:
    """The checkpoint of a stop, made when files are closed, knows their lengths too."""
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 12, signal.SIGTERM)).value["updates"] == 12
    for _ in range(2):
        assert go(folder, At("on_step", 15)).code == KILLED
        assert newest(folder).manifest["updates"] == 12
    finish(folder)
    assert [row["update"] for row in loss_rows(folder)] == list(range(1, 31))
    assert_eq(undisturbed(), folder)


def test_log_a_killed_before_the_first_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        assert go(folder, At("on_step", 4)).code == KILLED
    finish(folder)
    assert [row["update"] for row in loss_rows(folder)] == list(range(1, 31))
    assert_eq(undisturbed(), folder)


# --- TensorBoard ---


def board(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """What TensorBoard shows of a run, but for what saves cost and how fast it was: by tag,
    (update, value, time)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(("save/", "speed/"))
    }


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The same without the times."""
    return {tag: [(x, y) for x, y, _ in points] for tag, points in board(folder).items()}


def tensorboard(**options: Any) -> dict[str, Any]:
    hooks: dict[str, Hook] = {"tensorboard": TensorBoard()}
    return {"epochs": 2, "hooks": hooks, **options}


def test_log_a_tensorboard_is_purged(tmp_path: Path) -> None:
    options = tensorboard(save={"every_updates": 10})
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 14), **options).code == KILLED
    killed = time.time()
    finish(folder, **options)
    losses = board(folder)["train/loss"]
    assert [update for update, _, _ in losses] == list(range(1, 21))
    # The checkpoint's own update is written once more, since rows of it may come after the save.
    again = {update for update, _, moment in losses if moment >= killed}
    assert again - {10} == set(range(11, 21))
    assert shown(folder) == shown(reference(**options))
    assert_eq(undisturbed(**options), folder)


def test_log_a_tensorboard_after_several_interruptions(tmp_path: Path) -> None:
    options = tensorboard(
        test=True, phases={"test_every_updates": 5}, run={"log_every": 2},
        save={"every_updates": 3},
    )  # fmt: skip
    folder = tmp_path / "run"
    for at in (
        At("on_step", 2),
        At("on_phase_end", 10, phase="test", order=BETWEEN),
        At("on_step", 10, signal.SIGTERM, phase="test", position=1),
        At("on_step", 13),
        At("on_phase_end", 15, phase="test"),
    ):
        assert go(folder, at, **options).code in (0, KILLED)
    finish(folder, **options)
    assert shown(folder) == shown(reference(**options))
    assert_eq(undisturbed(**options), folder)


def test_log_a_going_back_cuts_both(tmp_path: Path) -> None:
    """A path in the run's own folder: rows after it are gone from the file and from the board."""
    options = tensorboard(save={"every_updates": 5, "keep_last": 9})
    whole = reference(**options)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    start = next((folder / "checkpoints").glob("update_000000010-*"))
    ended = go(folder, At("on_step", 13), run={"resume": str(start)}, **options)
    assert ended.code == KILLED
    assert [row["update"] for row in loss_rows(folder)] == list(range(1, 14))
    finish(folder, **options)
    assert equal.rows(folder) == equal.rows(whole)
    assert shown(folder) == shown(whole)
