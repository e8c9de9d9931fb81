"""The keys of who starts processes: what is wrong, and what another launcher has to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import phaseloop.hooks
import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop.engine.backends import Single
from phaseloop.engine.config.build import build
from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.processes import asked_for, wanted
from phaseloop.engine.config.schema import Schema, check
from phaseloop.engine.errors import ConfigError
from phaseloop.tools.run import run
from tests.rigs import cli

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started the tests, and what is set here is taken back."""
    for name in [*TORCHRUN, *SRUN, "PHASELOOP_STARTED_BY"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def started(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("value", ["abc", None, -5, 0, float("inf"), float("nan"), 1e300])
def test_a_wrong_time_to_start_is_said_by_key(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        asked_for({"name": "ddp", "processes": 2, "start_timeout": value})
    assert caught.value.key == "backend.start_timeout"


@pytest.mark.parametrize("value", [0.5, 3])
def test_a_short_time_to_start_is_one(value: float) -> None:
    assert asked_for({"name": "ddp", "processes": 2, "start_timeout": value}).several


@pytest.mark.parametrize(
    ("variables", "launcher", "again"),
    [(TORCHRUN, "torchrun", "--max-restarts"), (SRUN, "slurm", "--requeue")],
)
@pytest.mark.parametrize(
    "key_value",
    [("restarts", 2), ("rendezvous", "node1:29500"), ("nodes", 3)],
    ids=lambda pair: str(pair[0]),
)
def test_what_another_launcher_does_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    launcher: str,
    again: str,
    key_value: tuple[str, Any],
) -> None:
    started(monkeypatch, variables)
    key, value = key_value
    backend = {"name": "ddp", "nodes": 2, key: value}
    with pytest.raises(ConfigError) as caught:
        wanted(backend)
    assert caught.value.key == f"backend.{key}"
    assert launcher in str(caught.value)
    assert key != "restarts" or again in str(caught.value)


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
def test_the_same_number_as_another_launchers_is_none_to_start(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    started(monkeypatch, variables)
    assert wanted({"name": "ddp", "nodes": 2, "processes": 2}) is None


def test_our_own_launchers_processes_have_all_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, {**TORCHRUN, "PHASELOOP_STARTED_BY": "phaseloop"})
    keys = {"restarts": 2, "rendezvous": "node1:29500", "nodes": 2, "processes": 2}
    assert wanted({"name": "ddp", **keys}) is None


def test_without_a_launcher_machines_need_an_address() -> None:
    with pytest.raises(ConfigError) as caught:
        wanted({"name": "ddp", "nodes": 2})
    assert caught.value.key == "backend.rendezvous"


def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Schema:
    monkeypatch.chdir(cli.folder(tmp_path))
    return check(compose(["config=tiny", *words]).config)


def test_alone_auto_takes_what_several_processes_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file does for one process and for many."""
    words = ["backend.timeout=30", "backend.start_timeout=60", "backend.bucket_mb=5"]
    built = build(tiny(tmp_path, monkeypatch, *words))
    assert isinstance(built.task.backend, Single)


@pytest.mark.parametrize("word", ["backend.timeot=30", "backend.timeout=soon"])
def test_alone_auto_takes_nothing_that_several_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tiny(tmp_path, monkeypatch, word))
    assert caught.value.key == word.split("=")[0]


def test_a_misspelt_number_of_processes_is_told_the_right_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cli.folder(tmp_path))
    assert run(["config=tiny", "backend=ddp", "backend.proceses=2"]) == 2
    assert "backend.proceses: Ddp takes no option 'proceses'. Did you mean 'processes'?" in (
        capsys.readouterr().err
    )


def test_single_takes_no_such_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tiny(tmp_path, monkeypatch, "backend=single", "backend.timeout=30"))
    assert caught.value.key == "backend.timeout"


def test_several_processes_submit_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cli.folder(tmp_path))
    started(monkeypatch, TORCHRUN)
    assert run(["config=tiny", "launch=slurm"]) == 2
    assert "launch: submitting a job works in one process, and torchrun started 4" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("key", ["processes", "nodes"])
def test_spmd_is_one_process(key: str) -> None:
    given = {"name": "xla", "spmd": True, key: 2}
    if key == "nodes":
        given["rendezvous"] = "here:1234"
    with pytest.raises(ConfigError, match=f"one process has all devices, and backend.{key} is 2"):
        asked_for(given)
    assert not asked_for({"name": "xla", "spmd": True}).several
    assert asked_for({"name": "xla", "spmd": False, "processes": 2}).several
