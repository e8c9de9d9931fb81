"""The true command line with Horovod: by our own launcher, and by horovodrun; and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.contract import test_launch
from tests.contract.test_launch import (  # noqa: F401
    descendants,
    ended,
    newest,
    same,
    since_fault,
    test_exc_b_one_of_two_fails,
    test_sig_b_sigterm_to_one_of_two,
    undisturbed,
    weights,
)
from tests.rigs import cli, programs

HANGS = 90.0
"""Seconds after which a job counts as hanging."""

RUN = [sys.executable, str(cli.RUN)]


@pytest.fixture(autouse=True, scope="module")
def backend() -> Iterator[None]:
    """The jobs of the contract's tests run with Horovod."""
    before, test_launch.TWO = (
        test_launch.TWO,
        ["config=tiny", "backend=horovod", "backend.processes=2"],
    )
    yield
    test_launch.TWO = before


def horovodrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line on two processes that horovodrun starts; nothing is left of it."""
    return ended(start(cli.folder(folder), [*RUN, *words]))


def start(folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    program = programs.horovodrun(folder / "bin")
    return subprocess.Popen(
        [str(program), "-np", "2", "--gloo", *command],
        cwd=folder,
        env=cli.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def test_a_restart_has_a_rendezvous_of_its_own(tmp_path: Path, undisturbed: Path) -> None:  # noqa: F811
    test_launch.test_a_restart_resumes_exactly(tmp_path, undisturbed)


def test_sig_c_a_signal_to_the_launcher(tmp_path: Path, undisturbed: Path) -> None:  # noqa: F811
    test_launch.test_sig_c_signals_to_the_launcher(tmp_path, signal.SIGINT, undisturbed)


@pytest.mark.parametrize("by", ["us", "horovodrun"])
def test_digits(tmp_path: Path, by: str) -> None:
    words = ["config=digits", "hooks.progress=null", "run.threads=1", "hooks.tensorboard=null",
             "hooks.curves=null"]  # fmt: skip
    if by == "us":
        words += ["backend=horovod", "backend.processes=2"]
        done = ended(cli.start(words, tmp_path, start_new_session=True))
    else:  # which backend=auto joins
        done = ended(start(tmp_path, [*RUN, *words]))
    assert done.returncode == 0, done.stdout
    assert "2 processes" in done.stdout and done.stdout.count("finished ") == 1
    status = json.loads((tmp_path / "runs" / "digits" / "status.json").read_text())
    assert status["best"]["test/accuracy"] >= 0.98


@pytest.mark.parametrize("whom", ["a rank", "horovodrun"])
def test_a_stop_under_horovodrun_is_saved_and_goes_on_exactly(
    tmp_path: Path,
    undisturbed: Path,  # noqa: F811
    whom: str,
) -> None:
    """Horovodrun ends all as soon as one leaves with a code: none does before all are ready."""
    if whom == "a rank":
        # It kills five seconds after that.
        slow = ["hooks.tiny_slow_save.seconds=2", "hooks.tiny_slow_end.seconds=7"]
        told = "hooks.tiny_rank_fault={how: SIGTERM, update: 13}"
        done = horovodrun(tmp_path, "config=tiny", "backend=horovod", *slow, told)
        assert newest(tmp_path).manifest["updates"] == 14
    else:
        probe = ["hooks.tiny_probe.file=probe.txt", "hooks.tiny_probe.wait_at=7"]
        job = start(cli.folder(tmp_path), [*RUN, "config=tiny", *probe])
        cli.wait_for(tmp_path / "probe.txt.waiting", job, HANGS)
        job.send_signal(signal.SIGTERM)
        cli.let_go(tmp_path / "probe.txt", job, HANGS)
        done = ended(job)
        assert newest(tmp_path).manifest["updates"] == 8
    assert done.returncode == 1, done.stdout  # horovodrun knows no other code
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("stopped", "SIGTERM")
    assert horovodrun(tmp_path, "config=tiny").returncode == 0
    assert same(weights(tmp_path), weights(undisturbed))


def test_a_failure_under_horovodrun_ends_the_job(tmp_path: Path) -> None:
    done = horovodrun(tmp_path, "config=tiny", "hooks.tiny_rank_fault.how=raise")
    assert since_fault(tmp_path) < 30.0
    assert done.returncode == 1
    assert "rank 1: ValueError: planted fault" in done.stdout


def test_what_contradicts_horovodrun(tmp_path: Path) -> None:
    """Once by the command line; the others are in tests/engine/test_horovod.py."""
    done = horovodrun(tmp_path, "config=tiny", "backend.processes=3")
    assert done.returncode == 1
    assert "wrong configuration: backend.processes: is 3, and horovodrun started 2" in done.stdout


def test_torchrun_is_refused(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, *RUN[1:], "config=tiny", "backend=horovod"],
        cwd=cli.folder(tmp_path), env=cli.environment(), capture_output=True, text=True,
        timeout=HANGS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "wrong configuration: backend.name: torchrun started this process" in done.stderr
