"""Joining: who started this process is read from the environment, and never guessed."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest

from phaseloop.engine.backends import joining
from phaseloop.engine.backends.joining import Joining, first_host, found, tasks_per_node
from phaseloop.engine.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29500",
}

# The second task on the second of three nodes, as srun -N 3 --ntasks-per-node=2 sets them.
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NODELIST": "gpu[05-09]",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment without a launcher's variables, put back afterwards."""
    kept = dict(os.environ)
    for name in kept:
        if name.startswith("SLURM_") or name in {*TORCHRUN, joining.STARTED_BY}:
            monkeypatch.delenv(name)
    # A test may be started from a terminal, or without any standard input.
    monkeypatch.setattr(os, "isatty", lambda _: False)
    yield monkeypatch
    monkeypatch.undo()
    os.environ.clear()
    os.environ.update(kept)


def test_a_process_that_nobody_started_as_one_of_several_joins_none() -> None:
    assert found() is None


def test_torchruns_variables() -> None:
    os.environ.update(TORCHRUN)
    assert found() == Joining(3, 6, 1, 2, by="torchrun")
    os.environ[joining.STARTED_BY] = "phaseloop"
    assert found() == Joining(3, 6, 1, 2, by="phaseloop")


def test_a_world_of_one_is_joined_too() -> None:
    os.environ.update(TORCHRUN, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert found() == Joining(0, 1, 0, 1, by="torchrun")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    os.environ.update({key: value for key, value in TORCHRUN.items() if key != name})
    with pytest.raises(ConfigError, match=f"but not {name}"):
        found()


def test_an_address_alone_starts_nothing() -> None:
    """People export it in their shells, for programs of other kinds."""
    os.environ.update(MASTER_ADDR="alpha", MASTER_PORT="29500")
    assert found() is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "6"}, "RANK=6 has to be less than WORLD_SIZE=6"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 has to be less than LOCAL_WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1 .* is no number from 0 on"),
        ({"WORLD_SIZE": "six"}, "WORLD_SIZE=six .* is no number"),
        ({"LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE=7 is more than WORLD_SIZE=6"),
    ],
)
def test_torchruns_variables_that_cannot_be_true(changed: dict[str, str], said: str) -> None:
    os.environ.update({**TORCHRUN, **changed})
    with pytest.raises(ConfigError, match=said):
        found()


def test_slurms_variables_become_torchruns() -> None:
    os.environ.update(SLURM)
    assert found() == Joining(3, 6, 1, 2, by="slurm")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [os.environ[name] for name in names] == ["3", "6", "1", "2", "gpu07"]
    assert os.environ["MASTER_PORT"] == str(15000 + 1234567 % 15000)
    assert found() == Joining(3, 6, 1, 2, by="slurm"), "asked again, the same answer"


def test_two_steps_of_a_job_at_once_meet_at_two_ports() -> None:
    ports = []
    for step in ("0", "1"):
        os.environ.update(SLURM, SLURM_STEP_ID=step)
        assert found() is not None
        ports.append(os.environ.pop("MASTER_PORT"))
        for name in TORCHRUN:
            os.environ.pop(name, None)
    assert ports[0] != ports[1]


def test_what_somebody_set_himself_stands() -> None:
    os.environ.update(SLURM, MASTER_ADDR="10.0.0.7", MASTER_PORT="4711", WORLD_SIZE="6")
    del os.environ["SLURM_STEP_NODELIST"], os.environ["SLURM_JOB_NODELIST"]
    assert found() is not None
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.7", "4711")


def test_nodes_with_different_numbers_of_tasks() -> None:
    os.environ.update(SLURM, SLURM_STEP_TASKS_PER_NODE="1,3,2", SLURM_LOCALID="2")
    assert found() == Joining(3, 6, 2, 3, by="slurm")


def test_older_slurm_says_the_step_under_the_jobs_names() -> None:
    os.environ.update(SLURM, SLURM_NTASKS_PER_NODE="2")
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"):
        del os.environ[name]
    assert found() == Joining(3, 6, 1, 2, by="slurm")
    assert os.environ["MASTER_ADDR"] == "gpu05"


def test_a_batch_script_is_no_task() -> None:
    """sbatch --ntasks=6, and python without srun: every variable is there but the step's."""
    os.environ.update(SLURM, SLURM_PROCID="0", SLURM_LOCALID="0")
    for name in [name for name in os.environ if name.startswith("SLURM_STEP_")]:
        del os.environ[name]
    assert found() is None
    assert "RANK" not in os.environ


def test_a_single_task_is_a_process_on_its_own() -> None:
    """srun --pty bash in a job of six: the step has one task, whatever the job has."""
    os.environ.update(SLURM, SLURM_STEP_NUM_TASKS="1")
    assert found() is None


def test_a_shell_in_a_step_is_a_process_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun -n 6 --pty bash: the shell is told that it is one of six, and the others have ended."""
    ours, terminal = pty.openpty()
    monkeypatch.undo()
    monkeypatch.setattr(joining, "_STDIN", terminal)
    os.environ.update(SLURM)
    assert found() is None
    os.close(ours)
    os.close(terminal)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_PROCID": "6"}, "SLURM_PROCID=6 has to be less than SLURM_STEP_NUM_TASKS=6"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 has to be less than SLURM_STEP_TASKS_PER_NODE=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "makes 4 tasks, and SLURM_STEP_NUM_TASKS=6"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "count of tasks per node is 'two'"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, and by Slurm's variables it is 6: unset WORLD_SIZE"),
    ],
)
def test_slurms_variables_that_cannot_be_true(changed: dict[str, str], said: str) -> None:
    os.environ.update({**SLURM, **changed})
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        found()


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_NODEID"])
def test_a_variable_of_slurm_that_is_missing_is_named(name: str) -> None:
    os.environ.update({key: value for key, value in SLURM.items() if key != name})
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        found()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,7]", "node01"),
        ("node[7,9-10],gpu3", "node7"),
        ("alpha,beta[1-2]", "alpha"),
        ("rack[0-1]node[1-2]", "rack0node1"),
        ("a-b[3].site.org,c", "a-b3.site.org"),
    ],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_slurms_counts() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
