"""The command line in two replicas of XLA: trained, killed, stopped, failed; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.contract.test_launch import HANGS, ended, newest, same, since_fault, weights
from tests.rigs import cli

TWO = ["backend=xla", "backend.processes=2", "backend.device=cpu"]


def go(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The tiny experiment in two replicas; nothing is left of it."""
    return said_by(cli.Fork(["config=tiny", *TWO, *words], cli.folder(folder)))


def said_by(job: subprocess.Popen[str] | cli.Fork) -> subprocess.CompletedProcess[str]:
    """Its end, without what is not ours."""
    done = ended(job)
    assert "[Gloo]" not in done.stdout  # which torch 2.9 prints for each that it connects
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas from start to end: 3 epochs of 10 updates."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = go(folder)
    assert done.returncode == 0, done.stdout
    assert newest(folder).manifest["updates"] == 30
    assert os.listdir(folder / "runs") == ["tiny"]
    for line in ("epoch 3/3", "machine ", "finished "):
        assert done.stdout.count(line) == 1
    return folder


def test_digits_is_learnt(tmp_path: Path) -> None:
    """By the true command line."""
    job = cli.start(
        ["config=digits", *TWO, "hooks.progress=null", "hooks.curves=null"],
        tmp_path,
        start_new_session=True,
    )
    done = said_by(job)
    assert done.returncode == 0, done.stdout
    status = json.loads((tmp_path / "runs" / "digits" / "status.json").read_text())
    assert status["final"]["test/accuracy"] >= 0.98


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1: ValueError: planted fault\nTraceback (most recent call last):\n"),
        ("exit", "the process of all replicas ended with exit code 3\n"),
    ],
)
def test_exc_b_one_of_two_fails(tmp_path: Path, how: str, said: str) -> None:
    done = go(tmp_path, f"hooks.tiny_rank_fault.how={how}")
    assert since_fault(tmp_path) < 30.0
    assert done.returncode == 1, done.stdout
    assert said in done.stdout
    assert "rank 0" not in done.stdout and "peer" not in done.stdout
    told = done.stdout.count("ValueError: planted fault")
    assert told == (2 if how == "raise" else 0)  # before the traceback, and at its end
    assert "finished " not in done.stdout
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    if how == "raise":
        assert (status["status"], status["reason"]) == ("failed", said.splitlines()[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sig_b_and_c_a_signal_stops_both_at_one_border(
    tmp_path: Path, number: signal.Signals, undisturbed: Path
) -> None:
    probe = ["hooks.tiny_probe.file=probe.txt", "hooks.tiny_probe.wait_at=7"]
    folder = cli.folder(tmp_path)
    job = cli.Fork(["config=tiny", *TWO, *probe], folder)
    cli.wait_for(tmp_path / "probe.txt.waiting", job, HANGS)
    job.send_signal(number)
    cli.let_go(tmp_path / "probe.txt", job, HANGS)
    done = said_by(job)
    assert done.returncode == 128 + number, done.stdout
    assert done.stdout.count("stopping at the next border") == (number == signal.SIGINT)
    assert (tmp_path / "runs" / "tiny" / "checkpoints").exists(), done.stdout
    assert newest(tmp_path).manifest["updates"] == 8
    if number == signal.SIGTERM:
        assert go(tmp_path).returncode == 0
        assert same(weights(tmp_path), weights(undisturbed))


def test_res_a_killed_and_started_again_it_is_the_undisturbed_run(
    tmp_path: Path, undisturbed: Path
) -> None:
    """To the bit, with random shifts of every sample and dropout on the device."""
    done = go(
        tmp_path,
        "backend.restarts=1",
        "hooks.checkpoint.every_updates=4",
        "hooks.tiny_rank_fault={how: SIGKILL, rank: 1, update: 13, once: true}",
    )
    assert done.returncode == 0, done.stdout
    assert "the process of all replicas died (SIGKILL)\n" in done.stdout
    assert done.stdout.count("starting all processes again") == 1
    assert done.stdout.count("continuing from") == 1
    assert same(weights(tmp_path), weights(undisturbed))


def test_more_machines_are_refused(tmp_path: Path) -> None:
    done = go(tmp_path, "backend.nodes=2", "backend.rendezvous=localhost:1")
    assert done.returncode == 2
    assert "backend.nodes" in done.stdout and "one machine" in done.stdout
