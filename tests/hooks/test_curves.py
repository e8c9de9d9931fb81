"""Hook ``curves``: which rows make which curve, and that the picture is there when it should."""

import json
import math
import signal

import pytest

from phaseloop import Trainer, default_hooks
from phaseloop.hooks import curves
from phaseloop.hooks.curves import Curves, draw, read_panels
from tests.rigs import process, r1
from tests.rigs.probes import Scripted

PNG = b"\x89PNG\r\n\x1a\n"


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def log_point(update, **values):
    return {"phase": "train", "update": update, "epoch": 1, "time": 0.5, **values}


def phase_end(phase, update, **values):
    named = {f"{phase}/{name}": value for name, value in values.items()}
    return {"phase": phase, "update": update, "epoch": 1, "time": 0.5, **named}


def hooks(**changes):
    return default_hooks(**{"tensorboard": None, "progress": None, **changes})


def test_rows_become_panels(tmp_path):
    path = write(
        tmp_path / "rows",
        log_point(5, loss=2.0, lr=0.1),
        {"phase": "train", "event": "skip", "update": 6, "reason": "told to"},
        log_point(10, loss=1.0, lr=0.2),
        phase_end("train", 10, loss=1.5),
        phase_end("test", 10, loss=1.2, accuracy=0.75, perplexity=3.3),
    )
    panels = read_panels(path)
    assert panels == {
        "loss": {
            ("train", "log points"): ([5, 10], [2.0, 1.0]),
            ("train", ""): ([10], [1.5]),
            ("test", ""): ([10], [1.2]),
        },
        "accuracy": {("test", ""): ([10], [0.75])},
        "perplexity": {("test", ""): ([10], [3.3])},
        "learning rate": {("learning rate", "lr"): ([5, 10], [0.1, 0.2])},
    }
    assert list(panels) == ["loss", "accuracy", "perplexity", "learning rate"]


def test_several_shares_have_one_panel(tmp_path):
    path = write(
        tmp_path / "rows",
        phase_end("train", 10, accuracy=0.5),
        phase_end("test", 10, accuracy=0.25, top5=1.0, error=7.0),
    )
    assert read_panels(path) == {
        "metrics": {
            ("train", "accuracy"): ([10], [0.5]),
            ("test", "accuracy"): ([10], [0.25]),
            ("test", "top5"): ([10], [1.0]),
        },
        "error": {("test", ""): ([10], [7.0])},
    }


def test_parts_groups_and_optimizers(tmp_path):
    row = {"loss/ce": 1.0, "lr/0": 0.1, "generator/lr": 0.2, "grad_norm": 3.0}
    panels = read_panels(write(tmp_path / "rows", log_point(1, **row)))
    assert {name: list(series) for name, series in panels.items()} == {
        "loss/ce": [("train", "log points")],
        "learning rate": [("learning rate", "lr/0"), ("learning rate", "generator/lr")],
    }


def test_text_is_a_gap_and_half_a_line_is_passed_over(tmp_path):
    path = write(tmp_path / "rows", log_point(1, loss="nan"), log_point(2, loss="inf"))
    path.write_text(path.read_text() + '{"phase": "train", "upd')
    ((updates, values),) = read_panels(path)["loss"].values()
    assert updates == [1, 2]
    assert math.isnan(values[0]) and math.isinf(values[1])


def test_no_rows_no_panels(tmp_path):
    assert read_panels(tmp_path / "missing") == {}
    assert read_panels(write(tmp_path / "empty")) == {}


def test_the_figure_shows_every_series(tmp_path):
    path = write(
        tmp_path / "rows",
        *(log_point(u, loss=1.0 / u, lr=0.1) for u in range(1, 41)),
        phase_end("train", 40, loss=0.1),
        phase_end("test", 40, loss=0.1, accuracy=0.9),
    )
    loss, accuracy, rate = draw(read_panels(path)).axes
    labels = [text.get_text() for text in loss.get_legend().get_texts()]
    assert labels == ["train", "train, log points", "test"]
    assert loss.get_yscale() == "log"  # from 1 to 1/40
    assert accuracy.get_yscale() == rate.get_yscale() == "linear"
    assert [len(ax.lines) for ax in (loss, accuracy, rate)] == [3, 1, 1]
    assert {ax.get_xlabel() for ax in (loss, accuracy, rate)} == {"update"}
    test_loss, test_accuracy = loss.lines[-1], accuracy.lines[0]
    assert test_loss.get_color() == test_accuracy.get_color() != loss.lines[0].get_color()


@pytest.mark.parametrize("count", range(1, 8))
def test_any_number_of_panels_can_be_drawn(tmp_path, count):
    values = {f"metric{number}": 10.0 + number for number in range(count)}
    figure = draw(read_panels(write(tmp_path / "rows", phase_end("test", 1, **values))))
    assert [ax.get_title(loc="left") for ax in figure.axes if ax.axison] == list(values)


def test_a_run_leaves_its_picture_over_all_interruptions(tmp_path):
    stop = r1.At("on_step", 13, "stop")
    Trainer(r1.make_task(tmp_path, test=True), hooks(at=stop)).train()
    picture = tmp_path / "curves.png"
    assert picture.read_bytes().startswith(PNG)
    picture.unlink()
    Trainer(r1.make_task(tmp_path, test=True), hooks()).train()
    assert picture.read_bytes().startswith(PNG)
    updates, _ = read_panels(tmp_path / "metrics.jsonl")["loss"]["train", "log points"]
    assert updates == list(range(1, 31))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".curves")] == []


def test_a_failed_run_has_its_picture_too(tmp_path):
    with pytest.raises(r1.ToldError):
        Trainer(r1.make_task(tmp_path), hooks(at=r1.At("on_step", 13, "raise"))).train()
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_after_sigterm_there_is_no_time_for_a_picture(tmp_path):
    Trainer(r1.make_task(tmp_path), hooks(at=r1.At("on_step", 13, signal.SIGTERM))).train()
    assert not (tmp_path / "curves.png").exists()


def test_without_rows_or_a_folder_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    outcome = Trainer(r1.make_task(folder, epochs=1), {"curves": Curves()}).train()
    assert outcome.status == "finished"
    assert not (folder / "curves.png").exists()
    Trainer(r1.make_task(None, epochs=1), {"curves": Curves()}).train()
    assert list(tmp_path.iterdir()) == [folder]


def test_nan_metrics_do_not_hinder(tmp_path):
    meters = {"score": Scripted([math.nan, 2.0, math.inf])}
    Trainer(r1.make_task(tmp_path, test=True, test_meters=meters), hooks()).train()
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_drawn_fails_no_run(tmp_path, monkeypatch, caplog):
    def broken(panels):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(curves, "draw", broken)
    outcome = Trainer(r1.make_task(tmp_path, epochs=1), hooks()).train()
    assert outcome.status == "finished"
    assert "hooks.curves: no picture: RuntimeError: no fonts" in caplog.text


def _matplotlib_modules(folder):
    import sys

    sys.modules.pop("matplotlib.pyplot", None)  # torchmetrics may have imported it
    Trainer(r1.make_task(folder, epochs=1), hooks()).train()
    return "matplotlib.pyplot" in sys.modules, (folder / "curves.png").exists()


def test_matplotlib_is_used_without_its_global_state(tmp_path):
    assert process.result(_matplotlib_modules, tmp_path) == (False, True)
