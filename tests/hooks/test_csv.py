"""Hook ``csv``: a table of every row once, whatever interrupted the run, and of all its columns."""

from __future__ import annotations

import csv
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Hook, Trainer
from phaseloop.hooks.csv import Csv
from tests.rigs import process, r1, ranks
from tests.rigs.equal import rows as rows_of
from tests.rigs.probes import Scripted


class Late(Hook):
    """Records a value from update 14 on, in a name that a table has to quote."""

    def on_update(self, task: Any) -> None:
        if task.progress.updates >= 13:
            task.record('late, "at last"', task.progress.updates)


def train(folder: Path, save: Any = None, at: Any = None, **options: Any) -> Any:
    """Two epochs of 10 updates, each with a test, in a new process."""
    hooks = {"csv": Csv(), "late": Late(), **({} if at is None else {"at": at})}
    return process.run(r1.train, folder, save=save, hooks=hooks, epochs=2, test=True, **options)


def table(folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns, and rows without their times, which have to be numbers."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        found = list(rows)
    assert all(None not in row and None not in row.values() for row in found)  # as long as the head
    assert all(float(row.pop("time")) > 0 for row in found)
    return list(rows.fieldnames or []), found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("csv") / "run"
    assert train(folder).code == 0
    return folder


def test_it_has_the_rows_of_metrics_jsonl(undisturbed: Path) -> None:
    columns, found = table(undisturbed)
    places = ["time", "stage", "phase", "epoch", "update", "samples"]
    recorded = ["loss", "lr", "train/loss", "train/accuracy", "test/loss", "test/accuracy"]
    assert columns == [*places, *recorded, 'late, "at last"']
    wanted = [
        {name: str(row.get(name, "")) for name in columns[1:]} for row in rows_of(undisturbed)
    ]
    assert len(wanted) == 24  # a row for each update and one for each of four phases
    assert found == wanted


EVERY_10 = {"every_epochs": None, "every_updates": 10}


@pytest.mark.parametrize("save", [EVERY_10, {"every_updates": 4}], ids=["at 10", "at 12"])
@pytest.mark.parametrize(
    "at",
    [
        r1.At("on_step", 3),
        r1.At("on_phase_end", 10, phase="test"),
        r1.At("on_step", 15),
        r1.At("on_step", 19, signal.SIGTERM),
    ],
    ids=["before a checkpoint", "after new columns", "after a late column", "stopped"],
)
def test_killed_and_resumed_the_table_is_the_same(
    undisturbed: Path, tmp_path: Path, save: Any, at: Any
) -> None:
    folder = tmp_path / "run"
    assert train(folder, save, at).code in (-signal.SIGKILL, 0)
    assert train(folder, save).code == 0
    assert table(folder) == table(undisturbed)


def test_the_columns_of_rows_that_are_cut_off_go_too(tmp_path: Path) -> None:
    """The next run goes on without the hook that made them."""
    folder = tmp_path / "run"
    save = {"every_epochs": None, "every_updates": 12}
    train(folder, save, r1.At("on_step", 16))
    assert 'late, "at last"' in table(folder)[0]
    process.result(r1.train, folder, save=save, hooks={"csv": Csv()}, epochs=2, test=True)
    columns, found = table(folder)
    assert 'late, "at last"' not in columns
    assert [row["update"] for row in found if row["lr"]] == [str(k) for k in range(1, 21)]


def test_no_reader_sees_half_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that comes late is put in by renaming; a write that fails leaves what was there."""
    from phaseloop.engine import line_file

    seen = []

    def refuse(path: Path, write: Any) -> None:
        seen.append(path.read_bytes())
        raise OSError("no room")

    monkeypatch.setattr(line_file, "replace", refuse)
    with pytest.raises(OSError, match="no room"):
        Trainer(r1.make_task(tmp_path, epochs=1), r1.make_hooks(csv=Csv())).train()
    (before,) = seen
    assert (tmp_path / "metrics.csv").read_bytes() == before and before.count(b"\n") == 11


def test_values_that_are_no_numbers_are_read_as_such(tmp_path: Path) -> None:
    meters = {"score": Scripted([math.nan]), "most": Scripted([math.inf])}
    task = r1.make_task(tmp_path, epochs=1, train_meters=meters)
    Trainer(task, r1.make_hooks(csv=Csv())).train()
    row = table(tmp_path)[1][-1]
    assert math.isnan(float(row["train/score"])) and math.isinf(float(row["train/most"]))


def alone(folder: Path) -> str:
    Trainer(r1.make_task(folder, epochs=1), r1.make_hooks(csv=Csv())).train()
    return (folder / "metrics.csv").read_text()


def test_of_several_processes_one_writes(tmp_path: Path) -> None:
    first, second = ranks.results(alone, tmp_path / "run")
    assert first == second and first.count("\n") == 1 + 10 + 1


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Trainer(r1.make_task(None, epochs=1), {"csv": Csv()}).train()
    assert list(tmp_path.iterdir()) == []
