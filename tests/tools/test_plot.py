"""tools/plot.py: what a comparison of runs says is what their files say."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from phaseloop.engine.errors import ConfigError
from phaseloop.tools import plot
from phaseloop.tools.plotting import compare, panels, runs
from phaseloop.tools.plotting.colours import colours
from tests.rigs import cli, process, r1

HIGHER = {"train/loss": False, "test/loss": False, "test/accuracy": True}


def start(update: int, time: float) -> dict[str, Any]:
    return {"phase": "train", "event": "start", "update": update, "time": time,
            "higher_is_better": HIGHER}  # fmt: skip


def point(update: int, time: float, phase: str = "train", **values: Any) -> dict[str, Any]:
    """A row; 8 samples an update. ``test__loss`` stands for ``test/loss``."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    place = {"phase": phase, "update": update, "epoch": 1, "samples": 8 * update, "time": time}
    return {**place, **named}


ROWS = [
    start(0, 100.0),
    point(1, 101.0, loss=4.0, lr=0.1),
    point(2, 103.0, loss=3.0, lr=0.2),
    point(2, 110.0, "test", test__loss=5.0, test__accuracy=0.75),
    start(2, 900.0),  # 790 s after the row before: nobody was at work
    point(3, 904.0, loss="nan", lr=0.1),
    {"phase": "train", "event": "skip", "update": 4, "reason": "<overflow>"},
    point(4, 906.0, loss=1.0, lr=0.1),
    point(4, 907.0, "test", test__loss=2.0, test__accuracy=0.5),
]


def a_run(folder: Path, rows: list[dict[str, Any]] = ROWS, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"seed": 0, "run": {"dir": str(folder)}, "optimizer": {"lr": 0.1}, **config}
    (folder / "resolved.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def series(run: runs.RunData, panel: str, phase: str, kind: str) -> runs.Series:
    (found,) = [s for s in run.series if (s.panel, s.phase, s.kind) == (panel, phase, kind)]
    return found


def test_curves_over_updates_samples_and_the_time_of_work(tmp_path: Path) -> None:
    run = runs.read(a_run(tmp_path / "run"))
    loss = series(run, "loss", "train", runs.LOG_POINTS)
    assert loss.updates == [1, 2, 3, 4]
    assert loss.samples == [8, 16, 24, 32]
    # 1 and 3 s after the start; 10 s were spent until the resume, and 4 and 6 after it.
    assert loss.seconds == [1.0, 3.0, 14.0, 16.0]
    assert loss.values[:2] == [4.0, 3.0] and math.isnan(loss.values[2]) and loss.values[3] == 1.0
    accuracy = series(run, "accuracy", "test", runs.PHASE_ENDS)
    assert (accuracy.updates, accuracy.seconds, accuracy.values) == ([2, 4], [10.0, 17.0],
                                                                     [0.75, 0.5])  # fmt: skip
    assert series(run, runs.RATES, "train", runs.LOG_POINTS).values == [0.1, 0.2, 0.1, 0.1]


def test_events_stand_where_they_happened(tmp_path: Path) -> None:
    run = runs.read(a_run(tmp_path / "run"))
    assert [(e.kind, e.update, e.samples, e.seconds) for e in run.events] == [
        ("resume", 2, 16, 10.0),
        ("skip", 4, 24, 14.0),
    ]
    assert run.events[1].text == "skip at update 4: <overflow>"
    assert (run.count("resume"), run.count("skip"), run.count("roll_back")) == (1, 1, 0)


def test_speed_is_of_training_alone(tmp_path: Path) -> None:
    """From row to row of training in one process: 8 samples in 2 s, and 8 in 2 s."""
    assert runs.read(a_run(tmp_path / "run")).speed() == 16 / 4
    assert runs.read(a_run(tmp_path / "short", ROWS[:2])).speed() is None


def test_best_is_by_the_metrics_own_direction(tmp_path: Path) -> None:
    results = compare.summary(runs.read(a_run(tmp_path / "run"))).results
    assert results["test/loss"] == compare.Result(last=2.0, best=2.0, best_at=4)
    assert results["test/accuracy"] == compare.Result(last=0.5, best=0.75, best_at=2)
    unknown = [{**row, "higher_is_better": {}} if "event" in row else row for row in ROWS]
    told = compare.summary(runs.read(a_run(tmp_path / "unknown", unknown))).results
    assert told["test/loss"] == compare.Result(last=2.0)


def test_who_is_best_of_all(tmp_path: Path) -> None:
    better = [{**row, "test/accuracy": 0.9} if "test/accuracy" in row else row for row in ROWS]
    worse = [{**row, "test/loss": 9.0} if "test/loss" in row else row for row in ROWS]
    read = [runs.read(a_run(tmp_path / n, r)) for n, r in (("a", worse), ("b", better))]
    # Of equals the first one is named; b has the lower loss.
    wanted = {"test/loss": 1, "test/accuracy": 1}
    assert compare.winners(read, [compare.summary(run) for run in read]) == wanted
    assert compare.winners(read[:1], [compare.summary(read[0])]) == {}


def test_half_a_line_and_no_lines(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"phase": "train", "upd')
    assert runs.read(folder).updates == 4
    assert series(runs.read(folder), "loss", "train", runs.LOG_POINTS).updates == [1, 2, 3, 4]
    (folder / "metrics.jsonl").unlink()
    assert runs.read(folder).series == []


def test_stages_are_marked(tmp_path: Path) -> None:
    rows = [{**point(u, 100.0 + u, loss=1.0), "stage": s} for u, s in ((1, "a"), (2, "b"))]
    events = runs.read(a_run(tmp_path / "run", [start(0, 100.0), *rows])).events
    assert [(e.kind, e.text, e.update) for e in events] == [("stage", "stage b", 2)]


def test_only_what_differs_and_is_no_place(tmp_path: Path) -> None:
    one = runs.read(a_run(tmp_path / "a", hooks={"average": None}))
    other = runs.read(a_run(tmp_path / "b", optimizer={"lr": 0.2}, hooks={}))
    assert compare.differing([one, other]) == {
        "optimizer.lr": ["0.1", "0.2"],
        "hooks.average": ["null", compare.NOT_THERE],
        "hooks": [compare.NOT_THERE, "{}"],
    }
    assert compare.shared([one, other]) == {"seed": "0"}


def test_names_are_as_long_as_they_have_to_be(tmp_path: Path) -> None:
    assert compare.labels([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert compare.labels([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / "sweep" / name) for name in ("lr=1", "lr=2")]
    assert runs.find([tmp_path / "sweep", folders[0]]) == folders


def test_no_run_is_said(tmp_path: Path) -> None:
    a_run(tmp_path / "digits")
    with pytest.raises(ConfigError, match=r"digit: there is no such folder. .* 'digits'"):
        runs.find([tmp_path / "digit"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: is no run's folder and holds none"):
        runs.find([tmp_path / "empty"])


def test_thinned_keeps_ends_peaks_and_gaps() -> None:
    values = [0.0] * 1000
    values[333], values[700], values[701:730] = 9.0, -9.0, [math.nan] * 29
    kept = panels.thinned(values, 100)
    assert len(kept) <= 100 and kept == sorted(set(kept))
    assert {0, 333, 700, 999} <= set(kept)
    assert any(math.isnan(values[i]) for i in kept)
    assert panels.thinned(values, 1000) == list(range(1000))


@pytest.mark.parametrize("count", [1, 6, 7, 50])
def test_every_run_has_a_colour_of_its_own(count: int) -> None:
    found = colours(count)
    assert len(set(found)) == count
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in found)


# --- the page ---


def page_of(*folders: Path, out: Path) -> str:
    assert plot.run([*map(str, folders), f"out={out}"]) == 0
    return (out / plot.PAGE).read_text()


def data_of(page: str) -> dict[str, Any]:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    found: dict[str, Any] = json.loads(text[1])
    return found


def test_the_page_has_the_files_numbers_in_it(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path / "run"), out=tmp_path / "out")
    data = data_of(page)
    assert [p["name"] for p in data["panels"]] == ["loss", "accuracy", "learning rate"]
    (run,) = data["runs"]
    loss = next(s for s in run["series"] if s["panel"] == "loss" and s["kind"] == "log points")
    assert loss["values"] == [4.0, 3.0, None, 1.0]
    assert loss["time"] == [1.0, 3.0, 14.0, 16.0]
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"loss.png", "accuracy.png", "learning_rate.png"}


def test_what_runs_are_told_is_text_in_the_page(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    rows = [*ROWS, {"phase": "train", "event": "skip", "update": 4, "reason": evil}]
    folder = a_run(tmp_path / "<b>run", rows, model={"name": evil})
    page = page_of(folder, out=tmp_path / "out")
    assert "<img" not in page and "<b>run" not in page
    assert data_of(page)["runs"][0]["events"][-1]["text"] == f"skip at update 4: {evil}"


def test_a_run_without_metrics_yet_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of(a_run(tmp_path / "new", []), out=tmp_path / "out")
    assert "No metrics yet." in page
    assert "no metrics  new: it has not come to its first log point" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["outt=x"], "outt: there is no such word"),
        (["out="], "out: needs a folder"),
        (["--all"], "--all: there are no flags"),
        (["out=x"], "RUN: give the folder of a run"),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.run(words) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_was_killed_and_one_that_was_not(tmp_path: Path) -> None:
    """From the real files: curves are the same, and one of the two has a resume."""
    save = {"every_updates": 4}
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    process.result(r1.train, calm, epochs=1, save=save)
    ended = process.run(r1.train, killed, epochs=1, save=save, hooks={"at": r1.At("on_step", 6)})
    assert ended.code != 0
    process.result(r1.train, killed, epochs=1, save=save)
    one, other = runs.read(calm), runs.read(killed)
    assert [(s.panel, s.phase, s.updates, s.samples, s.values) for s in one.series] == [
        (s.panel, s.phase, s.updates, s.samples, s.values) for s in other.series
    ]
    assert (one.count("resume"), other.count("resume")) == (0, 1)
    (resume,) = other.events
    assert resume.update == 4
    assert one.config == {}  # made in Python


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    script = (
        "import sys; from phaseloop.tools import plot; "
        "assert plot.run(['run']) == 0; sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=cli.environment(), timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert f"page        run/plot/{plot.PAGE}" in ended.stdout
