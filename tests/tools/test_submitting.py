"""Submitting: what Slurm is asked for, by stand-ins for its commands, and what a job does."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phaseloop.tools import submitting
from phaseloop.tools.run import run
from phaseloop.tools.submitting import Job
from tests.rigs import cli

SBATCH = """\
#!/bin/sh
cp "$1" sbatch.sh
echo Submitted batch job 4711
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``tiny``, and commands of Slurm that write down what they were asked for."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun"):
        (commands / name).write_text(SBATCH)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.chdir(cli.folder(tmp_path / "work"))
    return tmp_path / "work"


def test_what_slurm_is_asked_for(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch=slurm", "launch.partition=gpu", "launch.time=2h 30s", "launch.mem_gb=1.5",
             "launch.gpus_per_node=4", "launch.cpus_per_node=32", "launch.setup=[module load a]",
             "launch.options={reservation: mine}", "launch.signal_before=5m", "backend=ddp",
             "backend.nodes=2", "backend.processes=4"]  # fmt: skip
    assert run(["config=tiny", *words]) == 0
    folder = cluster / "runs" / "tiny.launch"
    said = capsys.readouterr().out.splitlines()
    assert said == ["submitted   job 4711", f"log         {folder / '4711_0_log.out'}"]
    script = (cluster / "sbatch.sh").read_text()
    asked = [line[len("#SBATCH --") :] for line in script.splitlines() if line[:2] == "#S"]
    assert set(asked) >= {
        "partition=gpu", "time=121", "mem=1536MB", "gpus-per-node=4", "cpus-per-task=32",
        "nodes=2", "ntasks-per-node=1", "reservation=mine", "signal=USR2@300", "job-name=tiny",
    }  # fmt: skip
    assert "\nmodule load a\n" in script
    assert "--kill-on-bad-exit=1" in script
    assert not (cluster / "runs" / "tiny").exists()  # that is the job's business

    job = pickle.loads((folder / "4711_submitted.pkl").read_bytes()).function
    assert job.command[-len(words) - 1 :] == ["config=tiny", *words]
    assert (job.folder, job.nodes) == (str(cluster), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.tim=1h"], "launch.tim: there is no such key. Did you mean 'time'?"),
        (["launch.time=1"], "launch.time: 1"),
        (["launch.time=1m", "launch.signal_before=60s"], "is no less than the job's time"),
        (["launch.gpus_per_node=0"], "launch.gpus_per_node: 0 is less than 1"),
        (["launch.cluster=moon"], "launch.cluster: 'moon'"),
        (["launch.name=slum"], "launch.name: 'slum' is none. Did you mean 'slurm'?"),
    ],
)
def test_what_is_wrong_is_told_at_once(
    cluster: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(["config=tiny", "launch=slurm", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (cluster / "runs").exists()


def test_no_slurm_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cli.folder(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["config=tiny", "launch=slurm"]) == 2
    assert "srun" in capsys.readouterr().err


@pytest.fixture
def as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second task of a job of two machines."""
    variables = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "4711", "SLURM_PROCID": "1",
                 "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
                 "SLURM_JOB_NODELIST": "gpu[07-08]"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def job(script: str, folder: Path, nodes: int = 1) -> Job:
    return Job([sys.executable, "-c", script], {"A": "1"}, str(folder), nodes)


def test_a_job_on_two_machines_says_where_they_meet(as_a_job: None, tmp_path: Path) -> None:
    script = """
import os
names = ("A", "PHASELOOP_RENDEZVOUS", "PHASELOOP_SUBMITTED", "SLURM_PROCID", "SLURM_STEP_ID")
open("seen", "w").write(" ".join(os.environ.get(name, "-") for name in names))
"""
    job(script, tmp_path, nodes=2)()
    assert (tmp_path / "seen").read_text() == f"1 gpu07:{30000 + 4711 % 2000} 1 - -"


def test_what_slurm_tells_all_processes_of_a_job_is_for_the_job_alone(
    as_a_job: None, tmp_path: Path
) -> None:
    job("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)", tmp_path)()


def test_a_job_fails_with_its_command_line(as_a_job: None, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        job("raise SystemExit(3)", tmp_path)()


@pytest.mark.parametrize(
    ("task", "code", "waits"),
    [("1", 143, True), ("1", 1, False), ("1", 0, False), ("0", 143, False)],
)
def test_a_task_waits_while_the_first_one_queues_the_job_again(
    as_a_job: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    code: int,
    waits: bool,
) -> None:
    """srun --kill-on-bad-exit ends the first one when another one fails."""
    monkeypatch.setenv("SLURM_PROCID", task)
    slept: list[float] = []
    monkeypatch.setattr(submitting, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(submitting, "_LOOK", 0.0)
    made = job(f"raise SystemExit({code})", tmp_path, nodes=2)
    with contextlib.suppress(RuntimeError):
        made()
    assert max(slept, default=0.0) == (submitting._TO_BE_ENDED if waits else 0.0)


STOPPING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
open("here", "w")
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "again"), [(143, True), (0, True), (1, False)])
def test_a_job_that_is_told_to_save(as_a_job: None, tmp_path: Path, code: int, again: bool) -> None:
    """It waits until that is done; one that failed at it is not queued again."""
    made = job(STOPPING.format(code=code), tmp_path)
    queued = []

    def tell() -> None:
        while not made._pid or not (tmp_path / "here").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, lambda *_: queued.append(made.checkpoint()))
    other = threading.Thread(target=tell)
    other.start()
    try:
        made()
    except RuntimeError as error:
        assert f"ended with exit code {code}" in str(error)
    finally:
        other.join()
        signal.signal(signal.SIGUSR2, before)
    assert (queued[0] is not None) == again
    if again:
        assert queued[0].function is made
        assert pickle.loads(pickle.dumps(made))._pid == 0


def test_the_code_of_a_job_that_was_waited_for() -> None:
    class Submitted:
        def exception(self) -> Exception:
            return RuntimeError(
                "Traceback\nRuntimeError: the command line ended with exit code 143"
            )

    assert submitting._code(Submitted()) == 143
