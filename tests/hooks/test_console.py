"""Hook ``console``: what it says at the start, after tests and epochs, and at the end."""

import math
import re
import signal
from pathlib import Path

import pytest
from torch import nn

from phaseloop import Data, Phases, Stage, Task, Trainer, default_hooks
from phaseloop.engine.backends import Single
from phaseloop.hooks.console import Console
from phaseloop.hooks.early_stop import EarlyStop
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs import r1
from tests.rigs.equal import newest
from tests.rigs.probes import Scripted

PARAMETERS = (4 * 8 + 8) + (8 * 2 + 2)


def train(capsys, folder, hooks=None, **options):
    """Train R1 with the console; what was printed, by line."""
    if hooks is None:
        hooks = default_hooks(curves=None, tensorboard=None)
    Trainer(r1.make_task(folder, **options), hooks).train()
    return capsys.readouterr().out.splitlines()


def epoch_lines(lines):
    return [line for line in lines if line.startswith("epoch ")]


def value_of(lines, label):
    """The text beside a label, which must be there once."""
    (line,) = [line for line in lines if line.startswith(f"{label}  ")]
    return line.removeprefix(label).strip()


def number_after(line, words):
    return float(re.search(rf"{words}\s+(\S+)", line)[1])


def test_header_says_what_is_trained(capsys, tmp_path):
    folder = tmp_path / "run"
    lines = train(capsys, folder, test=True, data={"micro_batch_size": 2})
    assert value_of(lines, "model") == f"Sequential, {PARAMETERS} parameters"
    assert value_of(lines, "data") == "train 40 samples, test 6 samples"
    assert value_of(lines, "phases") == (
        "30 updates in 3 epochs of 10, batch size 4, micro-batches of 2, test every epoch"
    )
    assert value_of(lines, "machine") == "cpu, 1 thread"
    assert next(line for line in lines if line.startswith("run folder")).endswith(str(folder))
    assert not any(line.startswith("resumed") for line in lines)


def test_header_counts_what_is_trainable(capsys):
    model = r1.network()
    model[0].requires_grad_(False)
    lines = train(capsys, None, {"console": Console()}, model=model)
    assert value_of(lines, "model") == (
        f"Sequential, {PARAMETERS} parameters, {8 * 2 + 2} of them trainable"
    )
    assert "nothing is saved" in value_of(lines, "run folder")


def test_one_aligned_line_per_test_with_the_metrics(capsys, tmp_path):
    task = r1.make_task(tmp_path, test=True, epochs=11)
    outcome = Trainer(task, default_hooks(curves=None, tensorboard=None)).train()
    found = epoch_lines(capsys.readouterr().out.splitlines())
    assert [line[:23] for line in found] == [
        f"epoch {epoch:>2}/11  update {10 * epoch:>3}" for epoch in range(1, 12)
    ]
    assert len({line.index("test loss") for line in found}) == 1
    last = found[-1]
    assert number_after(last, "train loss") == round(outcome.final["train/loss"], 4)
    assert number_after(last, "test loss") == round(outcome.final["test/loss"], 4)
    train_accuracy, test_accuracy = re.findall(r"accuracy (\S+)", last)
    assert float(train_accuracy) == round(outcome.final["train/accuracy"], 4)
    assert float(test_accuracy) == round(outcome.final["test/accuracy"], 4)
    assert "lr 1.0e-01" in last
    assert last.endswith(" samples/s")


def test_without_tests_each_epoch_has_its_line(capsys, tmp_path):
    found = epoch_lines(train(capsys, tmp_path))
    assert len(found) == 3
    assert all("train loss" in line and "test" not in line for line in found)


def test_in_mid_epoch_no_stale_train_metrics(capsys, tmp_path):
    found = epoch_lines(
        train(capsys, tmp_path, test=True, epochs=2, phases={"test_every_updates": 5})
    )
    assert ["train loss" in line for line in found] == [False, True, False, True]
    assert [number_after(line, "update") for line in found] == [5, 10, 15, 20]
    assert all("test loss" in line for line in found)


def test_every_test_set_has_its_line(capsys):
    task = Task(
        model=r1.network(),
        criterion=nn.CrossEntropyLoss(),
        optimizer=lambda model: r1.optimizer("sgd", model),
        train=Data(r1.Samples(), r1.BATCH),
        test={name: Data(r1.Samples(6), r1.BATCH) for name in ("clean", "noisy")},
        phases=Phases(epochs=1),
    )
    Trainer(task, {"console": Console(), "meter_sync": MeterSync()}).train()
    found = epoch_lines(capsys.readouterr().out.splitlines())
    assert [re.findall(r"(clean|noisy) loss", line) for line in found] == [["clean"], ["noisy"]]


def test_summary_names_only_what_is_there(capsys, tmp_path):
    folder = tmp_path / "run"
    everything = train(capsys, folder, default_hooks(), test=True, epochs=1)
    for label in ("run folder", "curves", "checkpoints", "tensorboard"):
        path = Path([line for line in everything if line.startswith(label)][-1].split()[-1])
        assert path.exists(), label
    assert value_of(everything, "finished").startswith("10 updates, 1 epoch, ")
    assert re.search(r"best\s+(0\.\d+|1\.0+)$", value_of(everything, "test/accuracy"))

    bare = train(capsys, tmp_path / "bare", {"console": Console()}, test=True, epochs=1)
    absent = ("curves", "checkpoints", "tensorboard", "test/")
    assert not any(line.startswith(absent) for line in bare)


def test_without_meter_sync_there_are_no_metrics_and_no_error(capsys):
    (line,) = epoch_lines(train(capsys, None, {"console": Console()}, test=True, epochs=1))
    assert "loss" not in line
    assert line.startswith("epoch 1/1  update 10  lr 1.0e-01")


def test_nan_metrics_are_shown_as_such(capsys):
    hooks = {"console": Console(), "meter_sync": MeterSync()}
    meters = {"score": Scripted([math.nan])}
    lines = train(capsys, None, hooks, test=True, epochs=1, test_meters=meters)
    assert re.search(r"score +nan", epoch_lines(lines)[0])
    assert value_of(lines, "test/score") == "nan"


def test_a_failed_run_is_not_called_finished(capsys, tmp_path):
    hooks = default_hooks(curves=None, tensorboard=None, at=r1.At("on_step", 13, "raise"))
    with pytest.raises(r1.ToldError):
        Trainer(r1.make_task(tmp_path), hooks).train()
    said = capsys.readouterr().out
    assert "finished" not in said
    assert "ToldError: on_step at 13" in said
    assert value_of(said.splitlines(), "failed").startswith("after 13 updates")


def test_stopped_by_a_signal(capsys, tmp_path):
    hooks = default_hooks(curves=None, tensorboard=None, at=r1.At("on_step", 13, signal.SIGTERM))
    lines = train(capsys, tmp_path, hooks)
    assert value_of(lines, "stopped").startswith("13 updates")
    assert value_of(lines, "reason") == "SIGTERM"
    assert "finished" not in "\n".join(lines)


def test_resumed_in_mid_epoch(capsys, tmp_path):
    hooks = default_hooks(curves=None, tensorboard=None, at=r1.At("on_step", 13, "stop"))
    train(capsys, tmp_path, hooks)
    lines = train(capsys, tmp_path)
    assert value_of(lines, "resumed") == "in epoch 2 of 3, after update 13 of 30"
    assert value_of(lines, "finished").startswith("30 updates, 3 epochs, ")
    assert value_of(lines, "finished").endswith(" since the resume")


def test_an_already_finished_run_says_how_to_go_on(capsys, tmp_path):
    train(capsys, tmp_path, test=True)
    lines = train(capsys, tmp_path, test=True)
    assert value_of(lines, "already finished") == "after 30 updates: nothing to do"
    assert "phases.epochs (now 3)" in value_of(lines, "to go on")
    assert "run.resume=never" in value_of(lines, "to start anew")
    assert not epoch_lines(lines)
    more = train(capsys, tmp_path, test=True, epochs=4)
    assert value_of(more, "finished").startswith("40 updates, 4 epochs")


def test_an_already_finished_run_in_stages_names_the_key_of_the_last(capsys, tmp_path):
    stages = [Stage(name="warm", updates=2), Stage(name="main", updates=2, repeat=2)]
    train(capsys, tmp_path, phases=stages)
    lines = train(capsys, tmp_path, phases=stages)
    assert "phases.main.updates (now 2)" in value_of(lines, "to go on")


def test_a_stop_that_still_holds_says_so(capsys, tmp_path):
    def again():
        early_stop = EarlyStop("test/score", patience=1, mode="min")
        hooks = default_hooks(curves=None, tensorboard=None, early_stop=early_stop)
        meters = {"score": Scripted([1.0, 1.1])}
        return train(capsys, tmp_path, hooks, test=True, test_meters=meters)

    first = again()
    assert value_of(first, "stopped").startswith("20 updates")
    second = again()
    assert "early_stop: test/score" in value_of(second, "already stopped")
    assert "to go on" in "\n".join(second)
    assert not epoch_lines(second)


def test_a_finished_run_that_only_had_a_test_left_is_not_idle(capsys, tmp_path):
    hooks = default_hooks(
        curves=None, tensorboard=None, at=r1.At("on_step", 30, "stop", phase="test")
    )
    train(capsys, tmp_path, hooks, test=True)
    lines = train(capsys, tmp_path, test=True)
    assert value_of(lines, "finished").startswith("30 updates")
    (line,) = epoch_lines(lines)
    assert "train loss" in line and "test loss" in line
    assert "samples/s" not in line  # nothing was trained by this process


def test_only_the_primary_speaks(capsys):
    class Second(Single):
        primary = False

    lines = train(capsys, None, {"console": Console()}, epochs=1, backend=Second())
    assert lines == []


def test_a_test_of_a_checkpoint(capsys, tmp_path):
    train(capsys, tmp_path, test=True)
    saved = newest(tmp_path)
    Trainer(r1.make_task(tmp_path, test=True), default_hooks()).test(saved)
    lines = capsys.readouterr().out.splitlines()
    assert value_of(lines, "phases") == "test only"
    assert value_of(lines, "tested") == str(saved.path)
    assert value_of(lines, "test/accuracy")
    assert [line for line in lines if line.startswith("test loss")]
    assert not epoch_lines(lines) and "train/" not in "\n".join(lines)
