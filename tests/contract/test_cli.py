"""The command line: signals, errors, kills, resuming, and its other jobs.

Of each kind of case one is a true command line in a subprocess; the others are forks of a process
that has imported the engine, which train, stop and end as it does, five seconds sooner.
"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from phaseloop.engine.checkpoint.store import Store
from tests.rigs import cli

PROBE = "hooks.tiny_probe.file=probe.txt"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``tiny`` from start to end: 3 epochs of 10 updates."""
    folder = cli.folder(tmp_path_factory.mktemp("undisturbed"))
    done = cli.run(["config=tiny", PROBE], folder)
    assert done.returncode == 0, done.stderr
    return folder


def newest(folder: Path, name: str = "tiny") -> Path:
    store = Store(folder / "runs" / name / "checkpoints")
    return store.folder / store.names()[-1]


def status(folder: Path, name: str = "tiny") -> dict:
    return json.loads((folder / "runs" / name / "status.json").read_text())


def same_weights(one: Path, other: Path) -> None:
    a, b = (torch.load(path / "model.pt", weights_only=True) for path in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def probe(folder: Path) -> list[str]:
    """The probe's lines; those of updates that a kill undid appear once more, and must agree."""
    lines: dict[int, str] = {}
    for line in (folder / "probe.txt").read_text().splitlines():
        number = int(line.split()[0])
        assert lines.setdefault(number, line) == line, "an update done again was another one"
    return [lines[n] for n in sorted(lines)]


def test_the_whole_run_folder(undisturbed):
    run = undisturbed / "runs" / "tiny"
    assert status(undisturbed)["status"] == "finished"
    assert status(undisturbed)["updates"] == 30
    assert "test/accuracy" in status(undisturbed)["final"]
    assert "test/accuracy" in status(undisturbed)["best"]
    assert yaml.safe_load((run / "resolved.yaml").read_text())["phases"]["epochs"] == 3
    assert "saved update_000000030-2" in (run / "log.txt").read_text()
    assert len((undisturbed / "probe.txt").read_text().splitlines()) == 30


def test_res_f_the_same_command_again_says_finished_and_changes_nothing(undisturbed):
    before = newest(undisturbed)
    content = (before / "model.pt").read_bytes()
    again = cli.forked(["config=tiny", PROBE], undisturbed)
    assert again.returncode == 0
    assert "already finished" in again.stdout
    assert newest(undisturbed) == before and (before / "model.pt").read_bytes() == content
    assert len((undisturbed / "probe.txt").read_text().splitlines()) == 30


def test_only_test_writes_test_json_and_changes_nothing_else(undisturbed):
    run = undisturbed / "runs" / "tiny"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    done = cli.forked(["config=tiny", "only=test", "weights=newest"], undisturbed)
    assert done.returncode == 0, done.stderr
    result = json.loads((run / "test.json").read_text())
    final = status(undisturbed)["final"]
    assert result["metrics"] == {k: v for k, v in final.items() if k.startswith("test/")}
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert after.keys() - before.keys() == {run / "test.json"}
    assert all(after[path] == before[path] for path in before)


def test_plan_runs_nothing(tmp_path):
    done = cli.forked(["config=tiny", "plan=true", "schedule=cosine"], cli.folder(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "30 updates" in done.stdout
    assert "meter_sync, barrier" in done.stdout
    # Linear(4, 8) has 4*8 + 8 parameters, Linear(8, 2) 8*2 + 2: 58.
    assert " 58 " in done.stdout
    assert (tmp_path / "runs/tiny/plan.png").stat().st_size > 0
    assert not (tmp_path / "runs/tiny/checkpoints").exists()


@pytest.mark.parametrize(
    ("where", "words", "start"),
    [
        ("in a train batch", ["hooks.tiny_probe.wait_at=14"], cli.start),
        ("in a test phase", ["hooks.tiny_probe.wait_in_test=true"], cli.Fork),
    ],
)
def test_sig_a_sigterm_saves_and_the_resume_is_exact(tmp_path, undisturbed, where, words, start):
    folder = cli.folder(tmp_path)
    process = start(["config=tiny", PROBE, *words], folder)
    cli.wait_for(folder / "probe.txt.waiting", process)
    process.send_signal(signal.SIGTERM)
    cli.let_go(folder / "probe.txt", process)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 143, output
    assert status(folder)["status"] == "stopped" and "SIGTERM" in status(folder)["reason"]
    assert newest(folder).name.startswith(f"update_{status(folder)['updates']:09d}"), where
    done = cli.forked(["config=tiny", PROBE], folder)
    assert done.returncode == 0, done.stderr
    same_weights(newest(folder), newest(undisturbed))
    assert probe(folder) == probe(undisturbed)


@pytest.mark.parametrize("workers", [0, 2])
def test_sig_a_in_data_loading_before_update_1(tmp_path, workers):
    words = ["data.train.dataset.seconds=30", f"data.train.workers={workers}"]
    folder = cli.folder(tmp_path)
    process = cli.Fork(["config=tiny", *words], folder)
    cli.wait_for(folder / "runs/tiny/metrics.jsonl", process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 143, output
    # Nothing was finished, so there is nothing to save: the same command starts from the start.
    assert Store(folder / "runs/tiny/checkpoints").names() == []
    assert status(folder)["status"] == "stopped" and status(folder)["updates"] == 0


def test_sig_c_ctrl_c_saves(tmp_path):
    folder = cli.folder(tmp_path)
    process = cli.start(["config=tiny", PROBE, "hooks.tiny_probe.wait_at=5"], folder)
    cli.wait_for(folder / "probe.txt.waiting", process)
    process.send_signal(signal.SIGINT)
    cli.let_go(folder / "probe.txt", process)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 130, output
    assert newest(folder).name == "update_000000005-1"
    assert "Traceback" not in output


def test_sig_c_twice_leaves_at_once(tmp_path):
    folder = cli.folder(tmp_path)
    words = ["hooks.tiny_probe.wait_at=15", "hooks.checkpoint.every_updates=10"]
    process = cli.Fork(["config=tiny", PROBE, *words], folder)
    cli.wait_for(folder / "probe.txt.waiting", process)
    process.send_signal(signal.SIGINT)
    cli.wait_for(folder / "probe.txt.told", process)  # two that come at once would be one
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 130, output
    # The first Ctrl-C asked for a save at the border that the second did not wait for.
    assert newest(folder).name == "update_000000010-3", output
    assert status(folder)["status"] == "failed"


def test_exc_a_an_error_is_shown_and_the_run_is_failed(tmp_path):
    done = cli.run(["config=tiny", "hooks.tiny_fault={}"], cli.folder(tmp_path))
    assert done.returncode == 1
    assert "ValueError: planted fault" in done.stderr
    assert "finished" not in done.stdout
    assert status(tmp_path)["status"] == "failed"
    assert "planted fault" in status(tmp_path)["reason"]


def test_data_b_too_few_samples_and_none(tmp_path):
    folder = cli.folder(tmp_path)
    words = ["data.train.dataset.samples=3", "data.train.drop_last=true"]
    few = cli.forked(["config=tiny", *words], folder)
    assert few.returncode == 1
    assert "3 samples" in few.stderr and "batch of 4" in few.stderr
    none = cli.forked(["config=tiny", "data.train.dataset.samples=0"], folder)
    assert none.returncode == 1
    assert "data.train" in none.stderr and "empty" in none.stderr


def test_ck_j_another_configuration_in_the_same_folder_is_refused(undisturbed):
    before = newest(undisturbed)
    done = cli.forked(["config=tiny", "optimizer.lr=0.2"], undisturbed)
    assert done.returncode == 2
    assert "optimizer.lr: 0.1 -> 0.2" in done.stderr and "run.dir" in done.stderr
    assert newest(undisturbed) == before
    assert status(undisturbed)["status"] == "finished"  # of the run that is there
    done = cli.forked(["config=tiny", "optimizer.lr=0.2", "run.resume=never"], undisturbed)
    assert done.returncode == 0, done.stderr
    assert (undisturbed / "runs/tiny.old-1/checkpoints" / before.name).is_dir()
    # Put the first run back for the tests that compare with it.
    (undisturbed / "runs/tiny").rename(undisturbed / "runs/other")
    (undisturbed / "runs/tiny.old-1").rename(undisturbed / "runs/tiny")


def kill_until_done(
    folder: Path, words: list[str], kills: int, seed: int, start=cli.start, run=cli.run
) -> int:
    """SIGKILL at random instants, the same command each time, then let it finish; kills made."""
    draw = random.Random(seed)
    made = 0
    for _ in range(kills):
        process = start(words, folder)
        log = folder / "runs" / words[0].removeprefix("config=") / "log.txt"
        size = log.stat().st_size if log.exists() else 0
        # The import takes seconds; a kill counts from the first sign of life of this start.
        while process.poll() is None and (not log.exists() or log.stat().st_size == size):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.4))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            made += 1
        process.communicate(timeout=30)
    done = run(words, folder)
    assert done.returncode == 0, done.stderr
    return made


def test_res_n_killed_at_random_the_same_command_ends_the_same(tmp_path, undisturbed):
    folder = cli.folder(tmp_path)
    # The naps keep the run long enough to be hit.
    words = ["config=tiny", PROBE, "data.train.dataset.seconds=0.01",
             "hooks.checkpoint.every_updates=3"]  # fmt: skip
    # With true command lines: tests/crash/test_crash.py.
    assert kill_until_done(folder, words, 3, seed=7, start=cli.Fork, run=cli.forked) > 0
    same_weights(newest(folder), newest(undisturbed))
    assert probe(folder) == probe(undisturbed)


@pytest.mark.slow
def test_ten_kills_of_the_digits_run_end_in_equal_weights(tmp_path):
    words = ["config=digits", "hooks.checkpoint.every_updates=20"]
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    calm.mkdir()
    rough.mkdir()
    assert cli.run(words, calm, timeout=300).returncode == 0
    assert kill_until_done(rough, words, kills=10, seed=3) > 0
    same_weights(newest(rough, "digits"), newest(calm, "digits"))


MY_STEP = '''\
from phaseloop import Hook, register_hook, register_train_step


@register_train_step("doubled")
class Doubled:
    """The standard step with twice the loss, which counts its calls."""

    def __init__(self, factor: float = 2.0):
        self.factor, self.calls = factor, 0

    def __call__(self, task):
        batch = task.next_batch()
        loss = self.factor * task.criterion(task.forward(batch.input), batch.target)
        if task.train:
            self.calls += 1
            task.backward(loss)
            task.update()

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@register_hook("counter")
class Counter(Hook):
    def on_end(self, task, outcome):
        print(f"my step was called {task.train_step.calls} times")
'''


@pytest.mark.parametrize(
    ("form", "run"), [("./my_step.py", cli.forked), ("my_package.my_step", cli.run)]
)
def test_a_step_and_a_hook_from_outside_the_project(tmp_path, form, run):
    folder = cli.folder(tmp_path)
    place = folder / ("my_step.py" if form.startswith(".") else "my_package/my_step.py")
    place.parent.mkdir(exist_ok=True)
    place.write_text(MY_STEP)
    words = ["config=tiny", f"imports=[tests.rigs.tiny,{form}]", "train_step.name=doubled",
             "train_step.factor=3", "hooks.counter={}"]  # fmt: skip
    done = run([*words, "phases.epochs=2"], folder)
    assert done.returncode == 0, done.stderr
    assert "my step was called 20 times" in done.stdout
    done = cli.forked([*words, "phases.epochs=3"], folder)
    assert "my step was called 30 times" in done.stdout, "the step's state was not restored"


def test_multirun_makes_a_folder_for_each_job(tmp_path):
    folder = cli.folder(tmp_path)
    done = cli.run(["--multirun", "config=tiny", "seed=1,2", "phases.epochs=1"], folder)
    assert done.returncode == 0, done.stderr
    seeds = {}
    for job in (folder / "runs/tiny").iterdir():
        seeds[yaml.safe_load((job / "resolved.yaml").read_text())["seed"]] = job.name
    assert seeds == {1: "seed=1,phases.epochs=1", 2: "seed=2,phases.epochs=1"}


def test_help_lists_the_experiments(tmp_path):
    done = cli.run(["--help"], cli.folder(tmp_path))
    assert done.returncode == 0
    assert "digits" in done.stdout and "tiny" in done.stdout
