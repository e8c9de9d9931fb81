"""EXC-b, SIG-b and their like: the command line on two processes, and how it ends.

It is the true one, but for cases that only repeat how processes are started: those start forks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from phaseloop.engine.checkpoint.store import Saved, Store
from tests.rigs import cli, process, ranks

TWO = ["config=tiny", "backend=ddp", "backend.processes=2"]
LIMIT = 60.0
"""Seconds for a job on two processes: the contract's, on a machine that does nothing else."""

HANGS = 5 * LIMIT
"""Seconds after which a job counts as hanging, on any machine."""


def go(folder: Path, *words: str, fork: bool = False) -> subprocess.CompletedProcess[str]:
    """The command line on two processes, in a session of its own; nothing is left of it.

    Args:
        fork: launcher and processes are forks, which have imported the engine.
    """
    if fork:
        return ended(cli.Fork([*TWO, *words], cli.folder(folder)))
    return ended(cli.start([*TWO, *words], cli.folder(folder), start_new_session=True))


def ended(job: subprocess.Popen[str] | cli.Fork) -> subprocess.CompletedProcess[str]:
    """Its end; a job that hangs is ended, with a word on what it said."""
    below = set(descendants(job.pid))
    if isinstance(job, cli.Fork):
        output, _ = job.communicate(HANGS)
        assert job.returncode is not None
        assert not any(process.alive(pid) for pid in below)
        return subprocess.CompletedProcess(job.words, job.returncode, output)
    try:
        output, _ = job.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(job.pid), job.pid]:
            os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"it hangs:\n{job.communicate()[0]}") from None
    below |= set(descendants(job.pid))
    assert not any(process.alive(pid) for pid in below)
    return subprocess.CompletedProcess(job.args, job.returncode, output)


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, and those that they have."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [n for child in map(int, children) for n in [child, *descendants(child)]]


def newest(folder: Path) -> Saved:
    return next(Store(folder / "runs" / "tiny" / "checkpoints").whole(set_aside=False))


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return torch.load(newest(folder).path / "model.pt", weights_only=True)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def since_fault(folder: Path) -> float:
    """Seconds since the fault; what a busy machine needs to start two processes is before it."""
    return time.time() - float((folder / "fault.txt").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes from start to end: 3 epochs of 10 updates."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = go(folder)
    assert done.returncode == 0, done.stdout
    assert newest(folder).manifest["updates"] == 30
    # One folder, and every line of the console once, from the primary (DDP-g, CFG-e).
    assert os.listdir(folder / "runs") == ["tiny"]
    for line in ("epoch 3/3", "machine ", "finished "):
        assert done.stdout.count(line) == 1
    return folder


@pytest.mark.parametrize(
    ("how", "said", "fork"),
    [
        ("raise", "rank 1: ValueError: planted fault\nTraceback (most recent call last):\n", False),
        ("exit", "rank 1 ended with exit code 3\n", True),
        ("SIGKILL", "rank 1 died (SIGKILL)\n", True),
    ],
)
def test_exc_b_one_of_two_fails(tmp_path: Path, how: str, said: str, fork: bool) -> None:
    done = go(tmp_path, f"hooks.tiny_rank_fault.how={how}", fork=fork)
    assert since_fault(tmp_path) < 30.0
    assert done.returncode == 1, done.stdout
    assert said in done.stdout
    # What the other one met with is not told, and the fault but once.
    assert "rank 0" not in done.stdout and "peer" not in done.stdout
    told = done.stdout.count("ValueError: planted fault")
    assert told == (2 if how == "raise" else 0)  # before the traceback, and at its end
    assert "finished " not in done.stdout
    # The primary has only lost the other; what happened, the launcher has written.
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", said.splitlines()[0])


def test_sig_b_sigterm_to_one_of_two(tmp_path: Path, undisturbed: Path) -> None:
    stop = "hooks.tiny_rank_fault.how=SIGTERM"
    done = go(tmp_path, stop, "hooks.tiny_rank_fault.update=13")
    assert since_fault(tmp_path) < 20.0
    assert done.returncode == 143, done.stdout
    assert "rank" not in done.stdout.replace("ranks", "") and "Traceback" not in done.stdout
    # Both have stopped at one border, the one after the window in which the signal came.
    assert newest(tmp_path).manifest["updates"] == 14
    assert go(tmp_path, fork=True).returncode == 0
    assert same(weights(tmp_path), weights(undisturbed))


def test_a_restart_resumes_exactly(tmp_path: Path, undisturbed: Path) -> None:
    """Also one that was to begin anew: it did so once."""
    done = go(
        tmp_path,
        "backend.restarts=1",
        "run.resume=never",
        "hooks.checkpoint.every_updates=4",
        "hooks.tiny_rank_fault={how: SIGKILL, rank: 0, update: 13, once: true}",
        fork=True,
    )
    assert done.returncode == 0, done.stdout
    assert "rank 0 died (SIGKILL)\n" in done.stdout
    assert done.stdout.count("starting all processes again") == 1
    assert "(1 of 1)" in done.stdout
    assert done.stdout.count("continuing from") == 1
    assert os.listdir(tmp_path / "runs") == ["tiny"]  # nothing was put aside
    assert same(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
def test_a_wrong_option_is_told_once(tmp_path: Path) -> None:
    """The keys are checked before any process is started, options of components in all of them."""
    done = go(tmp_path, "optimizer.nestrov=true", "backend.restarts=2")
    assert done.returncode == 2
    assert done.stdout.count("optimizer.nestrov") == 1
    assert "again" not in done.stdout and "rank" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sig_c_signals_to_the_launcher(tmp_path: Path, number: int, undisturbed: Path) -> None:
    probe = ["hooks.tiny_probe.file=probe.txt", "hooks.tiny_probe.wait_at=7"]
    job = cli.start([*TWO, *probe], cli.folder(tmp_path), start_new_session=True)
    cli.wait_for(tmp_path / "probe.txt.waiting", job, HANGS)
    job.send_signal(number)
    cli.let_go(tmp_path / "probe.txt", job, HANGS)
    done = ended(job)
    assert done.returncode == 128 + number, done.stdout
    assert done.stdout.count("stopping at the next border") == (number == signal.SIGINT)
    assert newest(tmp_path).manifest["updates"] == 8
    assert go(tmp_path).returncode == 0
    assert same(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
def test_cfg_e_one_folder_for_each_job_of_a_multirun(tmp_path: Path) -> None:
    done = go(tmp_path, "--multirun", "optimizer.lr=0.1,0.2", "phases.epochs=1")
    assert done.returncode == 0, done.stdout
    made = sorted(p.parent.name for p in (tmp_path / "runs" / "tiny").rglob("status.json"))
    assert len(made) == 2 and all(f"optimizer.lr=0.{n}" in made[n - 1] for n in (1, 2))


@pytest.mark.slow
def test_cfg_e_one_folder_where_it_has_the_time_in_it(tmp_path: Path) -> None:
    """Every process, and each of those started again, would make another name of it."""
    done = go(
        tmp_path,
        "run.dir='runs/tiny-${now:%S%f}'",
        "backend.restarts=1",
        "phases.epochs=1",
        "hooks.checkpoint.every_updates=2",
        "hooks.tiny_rank_fault={how: exit, update: 7, once: true}",
    )
    assert done.returncode == 0, done.stdout
    assert "continuing from" in done.stdout
    assert len(os.listdir(tmp_path / "runs")) == 1
    assert done.stdout.count("run.dir has the time in it") == 1


# --- other launchers ---


def both(jobs: Sequence[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    return [ended(job) for job in jobs]


@pytest.mark.slow
def test_two_agents_of_torchrun_as_two_machines(tmp_path: Path, undisturbed: Path) -> None:
    cli.folder(tmp_path)
    port = ranks.free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                f"--master-port={port}", "--master-addr=127.0.0.1"]  # fmt: skip
    jobs = [
        subprocess.Popen(
            [*torchrun, f"--node-rank={node}", str(cli.RUN), "config=tiny"],
            cwd=tmp_path,
            env=cli.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in (0, 1)
    ]
    done = both(jobs)
    assert [job.returncode for job in done] == [0, 0], done
    assert sum(job.stdout.count("epoch 3/3") for job in done) == 1
    assert same(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
def test_two_machines_without_torchrun(tmp_path: Path, undisturbed: Path) -> None:
    words = ["config=tiny", "backend=ddp", "backend.nodes=2",
             f"backend.rendezvous=127.0.0.1:{ranks.free_port()}"]  # fmt: skip
    cli.folder(tmp_path)
    done = both([cli.start(words, tmp_path, start_new_session=True) for _ in (0, 1)])
    assert [job.returncode for job in done] == [0, 0], done
    assert sum(job.stdout.count("epoch 3/3") for job in done) == 1
    assert same(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
def test_a_failure_on_one_of_two_machines_is_told_on_both(tmp_path: Path) -> None:
    words = ["config=tiny", "backend=ddp", "backend.nodes=2", "hooks.tiny_rank_fault.how=raise",
             f"backend.rendezvous=127.0.0.1:{ranks.free_port()}"]  # fmt: skip
    cli.folder(tmp_path)
    done = both([cli.start(words, tmp_path, start_new_session=True) for _ in (0, 1)])
    assert [job.returncode for job in done] == [1, 1]
    for job in done:
        assert "rank 1: ValueError: planted fault\n" in job.stdout
    assert sum(f"on {socket.gethostname()}: rank 1" in job.stdout for job in done) == 1


@pytest.mark.slow
def test_slurms_srun(tmp_path: Path, undisturbed: Path) -> None:
    """Two tasks with the variables that srun -n 2 sets."""
    cli.folder(tmp_path)
    step = {"SLURM_JOB_ID": str(ranks.free_port()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "localhost"}  # fmt: skip
    jobs = [
        cli.start(
            ["config=tiny"],
            tmp_path,
            {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            start_new_session=True,
        )
        for rank in (0, 1)
    ]
    done = both(jobs)
    assert [job.returncode for job in done] == [0, 0], done
    assert sum(job.stdout.count("epoch 3/3") for job in done) == 1
    assert same(weights(tmp_path), weights(undisturbed))


def test_another_number_than_torchrun_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from phaseloop.tools.run import run

    monkeypatch.chdir(cli.folder(tmp_path))
    started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
               "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # fmt: skip
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert run(["config=tiny", "backend=ddp", "backend.processes=3"]) == 2
    said = capsys.readouterr().err
    assert "backend.processes: is 3, and torchrun started 2 on this machine" in said


# --- launch=slurm, by submitit's local executor: the same steps on this machine ---


@pytest.mark.slow
def test_a_job_that_has_to_make_room_is_queued_again(tmp_path: Path, undisturbed: Path) -> None:
    probe = ["hooks.tiny_probe.file=probe.txt", "hooks.tiny_probe.wait_at=7"]
    slurm = ["launch=slurm", "launch.cluster=local", "launch.wait=true", "run.resume=never"]
    job = cli.start([*TWO, *slurm, *probe], cli.folder(tmp_path), start_new_session=True)
    cli.wait_for(tmp_path / "probe.txt.waiting", job, HANGS)
    [task] = [pid for pid in descendants(job.pid) if "submitit.core._submit" in words_of(pid)]
    os.kill(task, signal.SIGUSR2)
    cli.let_go(tmp_path / "probe.txt", job, HANGS)
    done = ended(job)
    assert done.returncode == 0, done.stdout
    [log] = (tmp_path / "runs" / "tiny.launch").glob("*_log.out")
    said = log.read_text()
    assert done.stdout.splitlines()[-1] == f"log         {log}"
    assert said.count("reason       SIGTERM") == 1  # it saved, and stopped
    assert "Requeued job" in said
    assert said.count("continuing from") == 1 and "update_000000008" in said
    assert os.listdir(tmp_path / "runs") == ["tiny", "tiny.launch"]
    assert same(weights(tmp_path), weights(undisturbed))


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
