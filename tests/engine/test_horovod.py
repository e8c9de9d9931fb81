"""Backend ``horovod`` where Horovod is missing or unfit, and who may have started its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from phaseloop.engine.backends import Ddp, Horovod, joining
from phaseloop.engine.backends.joining import Joining
from phaseloop.engine.config.processes import resolved, wanted
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.task import _backend
from tests.rigs import cli

HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put back as it was."""
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A Horovod that can be imported, of which nothing more is asked."""
    module = types.ModuleType("horovod.torch")
    module.init = lambda: None  # type: ignore[attr-defined]
    package = types.ModuleType("horovod")
    package.torch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", module)
    monkeypatch.setattr(metadata, "version", lambda name: "0.28.1")
    return module


# --- the package ---


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def said() -> str:
    with pytest.raises(ConfigError) as caught:
        Horovod("cpu")
    assert caught.value.key == "backend.name"
    assert "make env-horovod" in str(caught.value) and "phaseloop[horovod]" in str(caught.value)
    return str(caught.value)


def test_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", _missing)
    assert "horovod is not installed" in said()


def test_it_is_too_old(fit: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.27.0")
    assert "horovod 0.27.0 is older than 0.28" in said()


def test_it_was_installed_without_its_part_for_torch(fit: types.ModuleType) -> None:
    del fit.init
    assert "horovod 0.28.1 was installed without its part for torch" in said()


def test_it_was_built_for_another_torch(
    fit: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", None)  # whose import is an ImportError
    assert "horovod 0.28.1 cannot be imported (" in said()


@pytest.mark.parametrize("words", [[], ["backend.processes=2"]])
def test_the_command_line_says_it_once_before_it_starts_anything(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from phaseloop.tools.run import run

    monkeypatch.setattr(metadata, "version", _missing)
    monkeypatch.chdir(cli.folder(tmp_path))
    assert run(["config=tiny", "backend=horovod", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("wrong configuration: backend.name: horovod is not installed") == 1
    assert not (tmp_path / "runs").exists()


def test_phaseloop_does_not_import_it() -> None:
    program = (
        "import sys, phaseloop, phaseloop.engine.backends, phaseloop.hooks; "
        "assert not any(name.split('.')[0] == 'horovod' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], env=cli.environment(), check=True)


# --- who started the processes ---


def test_horovodruns_variables_are_put_into_torchs_form() -> None:
    os.environ.update(HOROVODRUN)
    assert joining.found() == Joining(1, 2, 1, 2, by="horovodrun")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert joining.found() == Joining(1, 2, 1, 2, by="horovodrun")  # again
    assert "MASTER_ADDR" not in os.environ


def test_a_rank_of_somebody_else_is_named() -> None:
    os.environ.update(HOROVODRUN, RANK="0")
    with pytest.raises(ConfigError, match="RANK=0, and by horovodrun's variables it is 1"):
        joining.found()


def test_variables_that_cannot_be_true_together() -> None:
    os.environ.update(HOROVODRUN, HOROVOD_RANK="2")
    with pytest.raises(ConfigError, match="HOROVOD_RANK=2 has to be less than HOROVOD_SIZE=2"):
        joining.found()


def test_our_launchers_processes_stay_ours() -> None:
    """Each of them sets Horovod's variables itself."""
    os.environ.update(HOROVODRUN, **TORCHRUN, PHASELOOP_STARTED_BY="phaseloop")
    assert joining.found() == Joining(1, 2, 1, 2, by="phaseloop")


def test_auto_is_horovod_under_horovodrun(fit: types.ModuleType) -> None:
    os.environ.update(HOROVODRUN)
    assert resolved({"name": "auto"}) == {"name": "horovod"}
    backend = _backend()
    assert isinstance(backend, Horovod)
    assert (backend.rank, backend.world_size) == (1, 2)


def test_without_a_launcher_it_is_a_world_of_one(fit: types.ModuleType) -> None:
    backend = Horovod("cpu")
    backend.setup()
    assert (backend.rank, backend.world_size) == (0, 1)
    backend.teardown()


def test_others_than_horovod_are_refused_under_horovodrun() -> None:
    os.environ.update(HOROVODRUN)
    with pytest.raises(ConfigError, match="use backend=horovod, or auto"):
        Ddp("cpu")


@pytest.mark.parametrize(
    ("variables", "who"),
    [(TORCHRUN, "torchrun"), ({"OMPI_COMM_WORLD_SIZE": "2"}, "MPI"), ({"PMI_SIZE": "2"}, "MPI")],
)
def test_launchers_that_know_nothing_of_it(
    fit: types.ModuleType, variables: dict[str, str], who: str
) -> None:
    os.environ.update(variables)
    with pytest.raises(ConfigError, match=f"^backend.name: {who} started this process"):
        Horovod("cpu")


@pytest.mark.parametrize(
    ("keys", "key", "said"),
    [
        ({"processes": 3}, "backend.processes", "is 3, and horovodrun started 2"),
        ({"restarts": 1}, "backend.restarts", "has to start it again, which it does not"),
    ],
)
def test_what_contradicts_horovodrun(keys: dict[str, int], key: str, said: str) -> None:
    os.environ.update(HOROVODRUN)
    with pytest.raises(ConfigError) as caught:
        wanted({"name": "horovod", **keys})
    assert caught.value.key == key and said in str(caught.value)


def test_several_machines_are_horovodruns_affair() -> None:
    with pytest.raises(ConfigError, match=r"backend\.nodes: is 2, and .*horovodrun -np N -H"):
        wanted({"name": "horovod", "nodes": 2, "rendezvous": "here:29500"})
