"""Hook ``metrics_file``: each update once, whatever interrupted the run."""

import json
import logging
import os
import signal
from types import SimpleNamespace

import pytest

from phaseloop import Trainer
from phaseloop.engine.checkpoint import store
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs import process, r1
from tests.rigs.equal import rows, state_of


def test_stopped_then_killed_each_update_is_there_once(tmp_path):
    """The checkpoint at a stop is made after this hook has closed its file; it knows the length."""
    folder = tmp_path / "run"
    save = {"every_epochs": None}  # so that the one at the stop is the only one
    for at, code in (
        (r1.At("on_step", 12, signal.SIGTERM), 0),
        (r1.At("on_step", 15), -signal.SIGKILL),
    ):
        ended = process.run(r1.train, folder, epochs=2, save=save, hooks={"at": at})
        assert ended.code == code
    assert process.run(r1.train, folder, epochs=2, save=save).code == 0
    assert [row["update"] for row in rows(folder) if "loss" in row] == list(range(1, 21))


def test_the_file_of_another_machine_is_cut_at_a_lines_end(tmp_path):
    """Where checkpoints lie elsewhere, the file here may be of another part of the run."""
    lines = [json.dumps({"update": update, "loss": 0.5}).encode() + b"\n" for update in range(9)]
    path = tmp_path / "metrics.jsonl"
    for count, left in [(0, 0), (1, 0), (len(lines[0]) - 1, 0), (len(lines[0]), 1), (10_000, 9)]:
        path.write_bytes(b"".join(lines))
        cut(path, count, "update_000000009-1")
        assert path.read_bytes() == b"".join(lines[:left])


def cut(path, count, checkpoint):
    """The file cut back to ``count`` bytes, by a resume from that checkpoint."""
    folder = SimpleNamespace(path=path.parent, status=dict)
    task = SimpleNamespace(
        folder=folder, primary=True, resumed_here=True, meter_sets={},
        progress=SimpleNamespace(updates=0), resumed_from=f"checkpoints/{checkpoint}",
    )  # fmt: skip
    hook = MetricsFile()
    hook.on_start(task)
    hook.load_state_dict({"bytes": count})
    hook.on_resume(task)
    hook._lines.close()


def test_what_the_checkpoints_own_save_cost_stays(tmp_path):
    """It stands behind the rows that the checkpoint counts, and is known only after them."""
    own, later = (
        json.dumps({"event": "save", "update": 3, "checkpoint": f"update_000000003-{n}"}) + "\n"
        for n in (1, 2)
    )
    row, half = '{"update": 3, "loss": 0.5}\n', '{"event": "sa'
    path = tmp_path / "metrics.jsonl"
    for behind, stays in [("", ""), (own, own), (own + later, own), (later, ""),
                          (own + row + own, own), (row + own, ""), (own + half, own)]:  # fmt: skip
        path.write_text(row + behind)
        cut(path, len(row), "update_000000003-1")
        assert path.read_text() == row + stays


def test_rows_that_a_checkpoint_counts_on_are_on_the_disk_before_it(tmp_path, monkeypatch):
    """A kill does not show it: after a power failure the rows would be gone, and none says so."""
    folder, flushed = tmp_path / "new" / "run", []
    fsync = os.fsync

    def noted(file):
        flushed.append((os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    save = {"every_updates": 4, "every_epochs": None, "keep_last": 9}
    Trainer(r1.make_task(folder, epochs=1), r1.make_hooks(None, save)).train()
    paths = [path for path, _ in flushed]
    assert {str(tmp_path), str(folder.parent), str(folder)} <= set(paths)  # their names, too
    checkpoints = store.Store(folder / "checkpoints")
    assert len(checkpoints.names()) == 3
    for name in checkpoints.names():
        counted = state_of(store.verified(folder / "checkpoints" / name))["hooks"]["metrics_file"]
        before = flushed[: paths.index(str(folder / f"checkpoints/.writing-{name}/model.pt"))]
        sizes = [size for path, size in before if path == str(folder / "metrics.jsonl")]
        assert sizes and sizes[-1] >= counted["bytes"] > 0


def test_lost_rows_are_told(tmp_path, caplog):
    def train(epochs):
        with caplog.at_level(logging.WARNING):
            Trainer(r1.make_task(tmp_path, epochs=epochs), r1.make_hooks()).train()

    train(1)
    train(2)
    assert "lacks rows" not in caplog.text
    os.truncate(tmp_path / "metrics.jsonl", 300)
    train(3)
    assert "metrics.jsonl lacks rows from before the checkpoint: it has 300 bytes" in caplog.text


@pytest.mark.parametrize("status", ["readable", "empty", "gone"])
@pytest.mark.parametrize("left", ["whole", "empty", "gone"])
def test_of_lost_rows_and_of_a_new_place_is_said_what_is_true(tmp_path, caplog, status, left):
    def train(epochs):
        with caplog.at_level(logging.INFO):
            Trainer(r1.make_task(tmp_path, epochs=epochs), r1.make_hooks()).train()

    train(1)
    for file, what in (("status.json", status), ("metrics.jsonl", left)):
        if what == "empty":
            os.truncate(tmp_path / file, 0)
        elif what == "gone":
            (tmp_path / file).unlink()
    train(2)
    nothing = left == "gone" and status != "readable"
    known = left == "empty" or status == "readable"
    assert ("holds no logs of this run" in caplog.text) == nothing
    assert ("lacks rows" in caplog.text) == (left != "whole" and known)


def test_a_run_that_starts_from_anothers_checkpoint_lacks_no_rows(tmp_path, caplog):
    Trainer(r1.make_task(tmp_path / "a", epochs=1), r1.make_hooks()).train()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").touch()
    start = next((tmp_path / "a" / "checkpoints").glob("update*"))
    run = {"resume": str(start)}
    Trainer(r1.make_task(tmp_path / "b", epochs=2, run=run), r1.make_hooks()).train()
    assert "lacks rows" not in caplog.text
