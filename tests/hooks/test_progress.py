"""Hook ``progress``: sparse lines in a pipe, a bar in a terminal, nothing between log points."""

import re
import signal
import sys
from types import SimpleNamespace

import pytest

from phaseloop import ConfigError, Data, Hook, Phases, Stage, Trainer, default_hooks
from phaseloop.engine import fetching, report
from phaseloop.engine.phase_plan import Origin, PhasePlan
from phaseloop.engine.recorder import Recorder
from phaseloop.hooks import progress
from phaseloop.hooks.console import Console
from phaseloop.hooks.progress import Progress
from tests.rigs import process, r1
from tests.rigs.terminal import Terminal

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def lines_of(capsys, **options):
    """Train R1 with a progress hook alone; what it printed."""
    hook = options.pop("hook")
    Trainer(r1.make_task(None, **options), {"progress": hook}).train()
    return capsys.readouterr().out.splitlines()


class Clock:
    """A clock that goes on by a fixed time whenever it is read."""

    def __init__(self, by):
        self.by = by
        self.now = 0.0

    def monotonic(self):
        self.now += self.by
        return self.now


def test_a_line_at_log_points(capsys):
    lines = lines_of(capsys, hook=Progress(seconds=0), run={"log_every": 10})
    pattern = (
        r"epoch (\d)/3  update (\d+)/30  loss \d\.\d{4}  lr 1\.0e-01  +[\d,.]+ samples/s"
        r"  data wait [ \d]{1,2}\d %  [\d.]+ [MG]B(?:  +[\d.]+ s to go)?"
    )
    assert [re.fullmatch(pattern, line).groups() for line in lines] == [
        ("1", "10"),
        ("2", "20"),
        ("3", "30"),
    ]
    assert ["to go" in line for line in lines] == [True, True, False]


def test_columns_stand_below_each_other(capsys):
    lines = lines_of(capsys, hook=Progress(seconds=0))
    assert len(lines) == 30
    for word in ("update", "loss", "lr", "samples/s", "data wait"):
        assert len({line.index(word) for line in lines}) == 1, word


def test_lines_keep_their_distance(capsys, monkeypatch):
    # Read once at the start and once per update: 10 s are over at every third update.
    monkeypatch.setattr(progress, "time", Clock(by=4.0))
    lines = lines_of(capsys, hook=Progress(seconds=10))
    updates = [int(re.search(r"update +(\d+)/", line)[1]) for line in lines]
    assert updates == list(range(3, 31, 3))


class Slow(r1.Samples):
    """Samples that each take a second of a clock which moves by nothing else."""

    def __init__(self, clock, count=r1.SAMPLES):
        super().__init__(count)
        self.clock = clock

    def __getitem__(self, index):
        self.clock.now += 1
        return super().__getitem__(index)


class Working(Hook):
    """An update takes four seconds, beside its data."""

    def __init__(self, clock):
        self.clock = clock

    def on_update(self, task):
        self.clock.now += 4


def test_data_wait_is_the_time_in_which_the_training_waits(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(fetching, "perf_counter", clock.monotonic)
    for module in (progress, report):
        monkeypatch.setattr(module, "time", clock)
    task = r1.make_task(
        None, train=Data(Slow(clock), r1.BATCH), test={"test": Data(Slow(clock, 6), r1.BATCH)}
    )
    Trainer(task, {"progress": Progress(seconds=0), "working": Working(clock)}).train()
    lines = capsys.readouterr().out.splitlines()
    # Of the 4 + 4 seconds of each update; what a test reads is no part of it.
    assert task.waited == 30 * r1.BATCH
    waits = [re.search(r"([\d.]+) samples/s  data wait (\d+ %)", line).groups() for line in lines]
    assert waits == [("0.5", "50 %")] * 30


def test_no_total_before_the_end_of_a_stage_of_unknown_length(capsys):
    def of(lines):
        return [re.search(r"update +(\d+)(?:/(\d+))?", line).groups() for line in lines]

    def shown(printed):
        return [line for line in printed if "update" in line]

    known = [Stage(name="first", updates=3), Stage(name="last", updates=4)]
    lines = shown(lines_of(capsys, hook=Progress(seconds=0), phases=known))
    assert of(lines) == [(str(n), "7") for n in range(1, 8)]
    assert all("to go" in line for line in lines[:-1])

    task = r1.make_task(None, phases=[known[0], Stage(name="open", time="1h")])
    hooks = {"progress": Progress(seconds=0), "stop": r1.At("on_step", 5, "stop")}
    Trainer(task, hooks).train()
    lines = shown(capsys.readouterr().out.splitlines())
    assert of(lines) == [(str(n), None) for n in range(1, 6)]
    assert ["to go" in line for line in lines] == [False] * 3 + [True] * 2  # its time is known


def test_the_device_is_read_only_when_something_is_shown(capsys, monkeypatch):
    asked = []
    row = Recorder.row
    monkeypatch.setattr(Recorder, "row", lambda self: asked.append(1) or row(self))
    lines_of(capsys, hook=Progress(seconds=0), run={"log_every": 10})
    assert len(asked) == 30 / 10
    asked.clear()
    monkeypatch.setattr(progress, "time", Clock(by=0.0))
    lines_of(capsys, hook=Progress(seconds=10), run={"log_every": 10})
    assert asked == []


def test_tests_do_not_count_as_training(capsys):
    lines = lines_of(capsys, hook=Progress(seconds=0), test=True, run={"log_every": 10})
    assert len(lines) == 3


def test_negative_seconds_are_refused():
    with pytest.raises(ConfigError, match=r"hooks\.progress\.seconds"):
        Progress(seconds=-1)


def _imports_rich(seconds):
    Trainer(r1.make_task(None, epochs=1), {"progress": Progress(seconds)}).train()
    return "rich" in sys.modules


def test_rich_is_not_imported_outside_a_terminal():
    assert process.result(_imports_rich, 0.0) is False


class WritesOnly:
    """What users put into the place of ``sys.stdout`` to have a copy: it has but two methods."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("stdout", [WritesOnly(), None])
def test_a_run_whose_output_is_no_real_stream(monkeypatch, capsys, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    hooks = {"progress": Progress(seconds=0), "console": Console()}
    Trainer(r1.make_task(None, epochs=1), hooks).train()
    assert capsys.readouterr().err == ""
    if stdout is not None:
        assert "epoch 1/1  update 10/10  loss" in stdout.text  # of progress
        assert re.search(r"^epoch 1/1  update 10  lr", stdout.text, re.M)  # of console


# --- in a terminal ---


def plain(text):
    """Without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def eager(monkeypatch):
    """Every log point is shown, however fast they come."""
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0.0)


def test_a_bar_and_whole_log_lines(monkeypatch, eager):
    terminal = Terminal(monkeypatch)
    hooks = default_hooks(curves=None, tensorboard=None, checkpoint=None)
    Trainer(r1.make_task(None, test=True), hooks).train()
    assert sys.stdout is terminal.stdout  # what rich put there is taken away again
    text = terminal.close()
    found = re.split(r"[\r\n]+", plain(text))
    assert sum(line.startswith(f"epoch {epoch}/3  update") for line in found for epoch in (1, 2, 3))
    assert {f"epoch {e}/3" for e in (1, 2, 3)} <= {line[:9] for line in found}
    assert any(re.match(r"epoch 3/3 .* 30/30", line) for line in found)
    assert any(re.match(r"loss \d\.\d{4}  lr 1\.0e-01  +[\d,.]+ samples/s  d", x) for x in found)
    assert any(line.startswith("finished  ") for line in found)
    assert "to go" in text
    assert any(re.match(r"test .* 0/2 batches", line) for line in found)
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_a_killed_run_leaves_the_cursor_visible(monkeypatch):
    terminal = Terminal(monkeypatch)
    Trainer(r1.make_task(None), {"progress": Progress()}).train()
    text = terminal.close()
    first_bar = text.index("0/30")
    assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR) < first_bar
    assert HIDE_CURSOR not in text[first_bar:]


def test_an_error_closes_the_bar(monkeypatch, eager):
    terminal = Terminal(monkeypatch)
    hooks = {"progress": Progress(), "at": r1.At("on_step", 13, "raise")}
    with pytest.raises(r1.ToldError):
        Trainer(r1.make_task(None), hooks).train()
    assert sys.stdout is terminal.stdout
    text = terminal.close()
    assert "ERROR: ToldError: on_step at 13" in plain(text)
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_a_resumed_bar_begins_where_the_run_stands(monkeypatch, capsys, tmp_path):
    stop = r1.At("on_step", 13, signal.SIGINT)
    Trainer(r1.make_task(tmp_path), r1.make_hooks(at=stop)).train()
    terminal = Terminal(monkeypatch)
    Trainer(r1.make_task(tmp_path), r1.make_hooks(progress=Progress())).train()
    counts = re.findall(r"(\d+)/30", plain(terminal.close()))
    assert counts[0] == "13"


def test_a_run_with_nothing_left_shows_no_bar(monkeypatch, tmp_path):
    Trainer(r1.make_task(tmp_path), r1.make_hooks()).train()
    terminal = Terminal(monkeypatch)
    Trainer(r1.make_task(tmp_path), r1.make_hooks(progress=Progress())).train()
    assert HIDE_CURSOR not in terminal.close()


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    terminal = Terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    hooks = {"progress": Progress(seconds=0), "console": Console()}
    Trainer(r1.make_task(None, run={"log_every": 10}), hooks).train()
    text = terminal.close()
    assert "\x1b" not in text
    assert "epoch 3/3  update 30/30  loss" in text


def test_ranks_but_the_primary_are_silent(capsys, monkeypatch):
    task = r1.make_task(None)
    monkeypatch.setattr(type(task), "primary", property(lambda self: False))
    Trainer(task, {"progress": Progress(seconds=0)}).train()
    assert capsys.readouterr().out == ""


def test_the_total_counts_what_the_stages_before_have_really_made():
    """Of a stage whose length is a time nobody knows it before."""
    last = PhasePlan(Phases(updates=300), 10, [], Origin(updates=1200))
    planned = [PhasePlan(Phases(time="1h"), 10, []), PhasePlan(Phases(updates=300), 10, [])]
    stages = SimpleNamespace(plans=lambda: planned)
    task = SimpleNamespace(plan=last, progress=SimpleNamespace(stage=1), stages=stages)
    assert progress._total(task) == 1200 + 300
    task.plan, task.progress.stage = planned[0], 0
    assert progress._total(task) == 0


def test_time_to_go():
    task = SimpleNamespace(
        plan=PhasePlan(Phases(epochs=10), 10, []),
        progress=SimpleNamespace(updates=40, samples=160, stage=0),
        stages=SimpleNamespace(
            given=[None], loaders=[SimpleNamespace(samples=40)], plans=lambda: [task.plan]
        ),
    )
    hook = Progress()
    hook._whole = SimpleNamespace(rate=lambda samples: 8.0)
    assert hook._to_go(task) == "30 s to go"  # 6 epochs of 40 samples at 8 a second
    task.progress.updates = 100
    assert hook._to_go(task) == ""
    task.progress.updates, task.progress.seconds = 40, 45.0
    task.plan = PhasePlan(Phases(epochs=10, time="1m"), 10, [])
    assert hook._to_go(task) == "15 s to go"  # the time is over before
    task.plan = PhasePlan(Phases(epochs=10, time="2m"), 10, [])
    assert hook._to_go(task) == "30 s to go"
