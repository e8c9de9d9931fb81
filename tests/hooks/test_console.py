"""Hook ``console``: what it says at the start, after tests and epochs, and at the end."""

import math
import re
import signal
import time

import pytest
from torch import nn

from phaseloop import Data, Hook, Phases, Stage, Task, Trainer, default_hooks
from phaseloop.engine import spent
from phaseloop.engine.backends import Single
from phaseloop.engine.checkpoint.writer import Writer
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
    assert value_of(lines, "model") == (
        f"Sequential, {PARAMETERS} parameters ({4 * PARAMETERS} B), float32"
    )
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
        f"Sequential, {PARAMETERS} parameters ({4 * PARAMETERS} B), "
        f"{8 * 2 + 2} of them trainable, float32"
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


def test_header_counts_the_updates_of_all_stages(capsys):
    stages = [Stage(name="warm", updates=2), Stage(name="main", updates=3, repeat=2)]
    lines = train(capsys, None, {"console": Console()}, phases=stages)
    (total,) = [line for line in lines if line.endswith(" in all")]
    assert total.split() == [str(2 + 2 * 3), "updates", "in", "all"]


def inside(lines):
    """What the closing table says is in the run's folder."""
    return value_of(lines, "in it").split(", ")


def test_summary_names_only_what_is_there(capsys, tmp_path):
    folder = tmp_path / "run"
    everything = train(capsys, folder, default_hooks(), test=True, epochs=1)
    assert everything[-2].split() == ["run", "folder", str(folder)]
    found = inside(everything)
    assert found == ["checkpoints/", "curves.png", "metrics.jsonl", "tensorboard/", "log.txt"]
    assert all((folder / name).exists() for name in found)
    assert value_of(everything, "finished").startswith("10 updates, 1 epoch, ")

    bare = train(capsys, tmp_path / "bare", {"console": Console()}, test=True, epochs=1)
    assert inside(bare) == ["log.txt"]
    assert not any(line.startswith("test/") for line in bare)


def test_checkpoints_elsewhere_are_named(capsys, tmp_path):
    saves = tmp_path / "saves"
    lines = train(capsys, tmp_path / "run", epochs=1, run={"checkpoints": str(saves)})
    assert value_of(lines, "checkpoints") == str(saves)
    assert "checkpoints/" not in inside(lines)


def test_last_and_best_of_each_metric_and_where(capsys, tmp_path):
    meters = {"score": Scripted([2.0, 1.0, 3.0])}
    lines = train(capsys, tmp_path, test=True, test_meters=meters)
    (head,) = [line.split() for line in lines if line.split()[:1] == ["last"]]
    assert head == ["last", "best", "at", "update"]
    # 2, 1, 3 after updates 10, 20 and 30; the lowest is best.
    assert value_of(lines, "test/score").split() == ["3.0000", "1.0000", "20"]
    for name in ("train/loss", "test/loss"):
        assert len(value_of(lines, name).split()) == 3


def test_where_a_metric_was_best_outlives_a_resume(capsys, tmp_path):
    def go(epochs):
        meters = {"score": Scripted([2.0, 1.0, 3.0])}
        return train(capsys, tmp_path, test=True, test_meters=meters, epochs=epochs)

    go(2)
    assert value_of(go(3), "test/score").split() == ["3.0000", "1.0000", "20"]
    assert value_of(go(3), "test/score").split() == ["3.0000", "1.0000", "20"]  # nothing was left


def test_when_a_metric_was_best_is_not_made_up(capsys, tmp_path):
    """Of a checkpoint that does not say: the run went on without the hook before."""
    meters = {"score": Scripted([2.0, 1.0, 3.0, 0.5])}
    r1.train(tmp_path, epochs=2, test=True, test_meters=meters)
    capsys.readouterr()

    def go(epochs):
        meters = {"score": Scripted([2.0, 1.0, 3.0, 0.5])}
        return train(capsys, tmp_path, test=True, test_meters=meters, epochs=epochs)

    assert value_of(go(3), "test/score").split() == ["3.0000", "1.0000"]
    assert value_of(go(3), "test/score").split() == ["3.0000", "1.0000"]
    assert value_of(go(4), "test/score").split() == ["0.5000", "0.5000", "40"]


def test_time_over_all_processes(capsys, tmp_path, monkeypatch):
    """By a clock that goes on by an hour whenever it is read: hours are all that is told."""
    ticking = Ticking(monkeypatch)

    def hours(lines, label):
        return sum(int(found) for found in re.findall(r"(\d+) h 00 min", value_of(lines, label)))

    hooks = default_hooks(curves=None, tensorboard=None, at=r1.At("on_step", 13, "stop"))
    first = train(capsys, tmp_path, hooks, test=True)
    # Of each process: read when the hook is made, then when the run starts, from where it counts.
    assert hours(first, "stopped") == ticking.read - 2
    before = ticking.read
    lines = train(capsys, tmp_path, test=True)
    # The last reading of the first process, at its end, is behind its last checkpoint.
    assert hours(lines, "finished") == (before - 2 - 1) + (ticking.read - before - 2)
    assert value_of(lines, "finished").endswith(" in all, resumed once")
    parts = [hours(lines, part) for part in ("training", "testing")]
    assert min(parts) > 0 and sum(parts) < hours(lines, "finished")  # what is left lies between


class Ticking:
    """A clock that ``Spent`` reads, which goes on by an hour each time."""

    def __init__(self, monkeypatch):
        self.read = 0
        self.perf_counter = time.perf_counter
        monkeypatch.setattr(spent, "time", self)
        monkeypatch.setattr(Writer, "count", lambda self, save, since: None)

    def monotonic(self):
        self.read += 1
        return 3600.0 * self.read


class RollBack(Hook):
    """Goes back to the last checkpoint once, in update 14."""

    def __init__(self):
        self.done = False

    def on_gradients(self, task):
        if task.progress.updates == 13 and not self.done:
            self.done = True
            task.roll_back("asked for by the test", 1)


def test_a_roll_back_is_no_resume_and_its_time_is_counted_once(capsys, tmp_path, monkeypatch):
    ticking = Ticking(monkeypatch)
    hooks = default_hooks(curves=None, tensorboard=None, back=RollBack())
    told = value_of(train(capsys, tmp_path, hooks), "finished")
    assert "resumed" not in told and told.endswith("1 roll-back")
    # As in a run without one: read when the hook is made, and when the run starts.
    assert f"{ticking.read - 2} h 00 min" in told


def test_skipped_updates_are_told(capsys, tmp_path):
    hooks = default_hooks(curves=None, tensorboard=None, skip=r1.SkipSome())
    lines = train(capsys, tmp_path, hooks, epochs=1)
    skipped = int(re.search(r"(\d+) updates skipped", value_of(lines, "finished"))[1])
    assert skipped == sum("was skipped" in line for line in lines) > 0


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
    # That of the first epoch is the newest checkpoint: after an error in a hook none is made.
    assert value_of(said.splitlines(), "to go on") == "the same command, from update 10"


def test_stopped_by_a_signal(capsys, tmp_path):
    hooks = default_hooks(curves=None, tensorboard=None, at=r1.At("on_step", 13, signal.SIGTERM))
    lines = train(capsys, tmp_path, hooks)
    assert value_of(lines, "stopped").startswith("13 updates")
    assert value_of(lines, "reason") == "SIGTERM"
    assert value_of(lines, "to go on") == "the same command, from update 13"
    assert "finished" not in "\n".join(lines)


def test_resumed_in_mid_epoch(capsys, tmp_path):
    hooks = default_hooks(curves=None, tensorboard=None, at=r1.At("on_step", 13, "stop"))
    train(capsys, tmp_path, hooks)
    lines = train(capsys, tmp_path)
    assert value_of(lines, "resumed") == "in epoch 2 of 3, after update 13 of 30"
    assert value_of(lines, "finished").startswith("30 updates, 3 epochs, ")
    assert value_of(lines, "finished").endswith(" in all, resumed once")


def test_what_came_before_is_not_known_without_the_hook(capsys, tmp_path):
    stop = r1.At("on_step", 13, "stop")
    Trainer(r1.make_task(tmp_path), r1.make_hooks(at=stop)).train()
    lines = train(capsys, tmp_path)
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
