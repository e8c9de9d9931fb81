"""CK behind fsspec: checkpoints in a bucket of a real S3 server, over a real network."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Hook, Order, Task
from phaseloop.engine.checkpoint import remote, store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from phaseloop.engine.errors import CheckpointError, ConfigError
from phaseloop.engine.urls import Url, place
from phaseloop.tools.replaying import find
from phaseloop.tools.run import exit_code, run
from tests.crash import command
from tests.rigs import cli, equal, process, r1, s3
from tests.rigs.equal import assert_eq, probe_of, undisturbed
from tests.rigs.r1 import At

pytestmark = pytest.mark.xdist_group("s3")

KILLED = -signal.SIGKILL
SAVE: dict[str, Any] = {"every_updates": 3, "every_epochs": None}
"""In the background; before something is broken off, the save before is waited for."""


@pytest.fixture(scope="session")
def server() -> Iterator[s3.Server]:
    found = s3.Server()
    yield found
    found.close()


@pytest.fixture
def url(server: s3.Server) -> str:
    """A place for checkpoints in a new bucket."""
    return f"s3://{server.bucket()}/runs/a"


def settings(server: s3.Server, url: str, **more: Any) -> dict[str, Any]:
    return {"checkpoints": url, "storage_options": server.options, **more}


def go(folder: Path, run: dict[str, Any], at: Hook | None = None, **options: Any) -> process.Ended:
    """One process of the run in ``folder``, broken off by ``at``, or to its end."""
    hooks = {} if at is None else {"at": at}
    options = {"save": SAVE, **options}
    return process.run(r1.train, folder, probe_of(folder), run=run, hooks=hooks, **options)


def checkpoints(server: s3.Server, url: str) -> store.Store:
    return store.Store(place(url, server.options))


def finished(server: s3.Server, url: str, folder: Path) -> Path:
    """The run's folder, with its checkpoints fetched into it, for a comparison."""
    server.fetch(url, folder / "checkpoints")
    return folder


# --- CK-a: killed while a checkpoint is sent or removed ---


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_sending(task: Task) -> None:
    remote.Remote.create = die  # type: ignore[method-assign]


def die_before_the_manifest(task: Task) -> None:
    remote.Remote.finish = die  # type: ignore[method-assign]


def die_before_removing(task: Task) -> None:
    remote.Remote.remove = die  # type: ignore[method-assign]


def die_while_removing(task: Task) -> None:
    assert task.store is not None
    system: Any = task.store._storage._fs  # type: ignore[union-attr]
    remove = system.rm_file

    def remove_and_die(path: str) -> None:
        remove(path)
        die()

    system.rm_file = remove_and_die


class ArmAt(Hook):
    """Before the checkpoint hook is called at update ``updates``, arms what will kill."""

    order = Order.LOG

    def __init__(self, updates: int, arm: Callable[[Task], None]) -> None:
        self.updates = updates
        self.arm = arm

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.updates:
            task.writer.settle()
            self.arm(task)


@pytest.mark.parametrize(
    ("arm", "left", "background"),
    [
        (die_before_the_manifest, [12], True),
        (die_while_removing, [15], True),
        pytest.param(die_before_sending, [12], True, marks=pytest.mark.slow),
        pytest.param(die_before_removing, [12, 15], True, marks=pytest.mark.slow),
        pytest.param(die_before_the_manifest, [12], False, marks=pytest.mark.slow),
        pytest.param(die_while_removing, [15], False, marks=pytest.mark.slow),
    ],
)
def test_ck_a_killed_while_saving(
    tmp_path: Path,
    server: s3.Server,
    url: str,
    arm: Callable[[Task], None],
    left: list[int],
    background: bool,
) -> None:
    folder, run = tmp_path / "run", settings(server, url)
    save = {**SAVE, "background": background}
    assert go(folder, run, ArmAt(15, arm), save=save).code == KILLED
    names = checkpoints(server, url).names()
    assert [store.position(name)[0] for name in names] == left

    ended = go(folder, run, save=save)
    assert ended.code == 0, ended.output
    cut = arm in (die_before_the_manifest, die_while_removing)
    assert ("has no manifest.json: removed" in ended.output) == cut
    assert "set_aside" not in ended.output  # what was cut short is no checkpoint, and no damage
    assert r1.lives(probe_of(folder))[1][0]["update"] == left[-1] + 1
    assert_eq(undisturbed(save=SAVE), finished(server, url, folder))
    last = checkpoints(server, url).names()
    assert len(last) == 1  # the one that was asked for, and nothing else of any
    files = [MODEL, STATE, store.MANIFEST]
    assert server.keys(url) == sorted([remote.OWNER, *(f"{last[0]}/{file}" for file in files)])


# --- CK-b: damage ---


def test_ck_b_the_one_before_a_damaged_one_is_used(
    tmp_path: Path, server: s3.Server, url: str
) -> None:
    folder, run = tmp_path / "run", settings(server, url)
    save = {**SAVE, "keep_last": 2}
    assert go(folder, run, At("on_step", 13), save=save).code == KILLED
    damaged = store.folder_name(12, 1)
    content = bytearray(server.fs.cat_file(f"{url}/{damaged}/{MODEL}"))
    content[len(content) // 2] ^= 1
    server.fs.pipe_file(f"{url}/{damaged}/{MODEL}", bytes(content))

    ended = go(folder, run, save=save)
    assert ended.code == 0, ended.output
    assert f"{url}/{damaged} is damaged: {MODEL}" in ended.output
    assert r1.lives(probe_of(folder))[1][0]["update"] == 10
    assert f"set_aside/{damaged}/{MODEL}" in server.keys(url)
    assert_eq(undisturbed(save=save), finished(server, url, folder))


# --- CK-c: the wire is cut in the middle of a file ---


class CutAt(Hook):
    """Before the save at ``updates``: the wire, held by the test's process, is to be cut."""

    order = Order.LOG

    def __init__(self, updates: int, told: Path) -> None:
        self.updates = updates
        self.told = told

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.updates:
            task.writer.settle()
            self.told.touch()
            while self.told.exists():
                time.sleep(0.005)


def test_ck_c_a_wire_that_is_cut_leaves_the_checkpoint_before(
    tmp_path: Path, server: s3.Server, url: str
) -> None:
    folder, wire, told = tmp_path / "run", s3.Wire(server.port), tmp_path / "told"
    over_wire = {"checkpoints": url, "storage_options": s3.options(wire.port)}
    options: dict[str, Any] = {"save": SAVE, "extra": 256}  # 256 KiB of weights
    running = process.start(
        r1.train, folder, probe_of(folder), run=over_wire, hooks={"cut": CutAt(12, told)}, **options
    )
    while not told.exists():
        assert process.alive(running.pid)
        time.sleep(0.005)
    wire.cut_after(128 * 1024)
    told.unlink()
    ended = running.wait()
    assert ended.code == 1
    assert "CheckpointError" in ended.output and "update_000000012-1" in ended.output
    there = checkpoints(server, url)
    assert there.names() == [store.folder_name(9, 1)]
    assert next(there.whole()).manifest["updates"] == 9
    assert "saved update_000000012" not in (folder / "log.txt").read_text()

    assert go(folder, settings(server, url), **options).code == 0  # the wire is whole again
    assert_eq(undisturbed(**options), finished(server, url, folder))


# --- CK-e and CK-j, on another machine ---


def words(server: s3.Server, url: str, *more: str) -> list[str]:
    secrets = f"key: {s3.KEY}, secret: {s3.SECRET}"
    return ["config=tiny", "run.dir=run", f"run.checkpoints={url}", "run.log_every=1",
            "hooks.tiny_probe.file=probe",
            f"run.storage_options={{{secrets}, endpoint_url: 'http://127.0.0.1:{server.port}'}}",
            *more]  # fmt: skip


def test_ck_e_on_another_machine_the_same_command_goes_on(
    tmp_path: Path, server: s3.Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, and nothing is left but the bucket: the same weights, and the rows from there on."""
    cli.folder(tmp_path / "there")
    monkeypatch.chdir(cli.folder(tmp_path / "here"))
    assert (
        run(["config=tiny", "run.dir=run", "run.log_every=1", "hooks.tiny_probe.file=probe"]) == 0
    )

    there, at = tmp_path / "there", checkpoints(server, url)
    begin = 10  # the newest is the one after the test at the epoch's end, whose row it knows
    newest = store.folder_name(begin, 2)
    waiting = words(server, url, "hooks.tiny_probe.wait_at=11")
    running = process.start(command.main, there, waiting, {})
    while not (there / "probe.waiting").exists() or at.names() != [newest]:
        assert process.alive(running.pid), running.printed()
        time.sleep(0.01)
    running.send(signal.SIGKILL)
    assert running.wait().code == KILLED
    shutil.rmtree(there / "run")
    (there / "probe").unlink()

    again = process.run(command.main, there, words(server, url), {})
    assert again.code == 0, again.output
    assert f"holds no logs of this run: they begin after update {begin}" in again.output
    assert f"continuing from {url}/{newest}" in again.output
    folder = there / "run"
    rows = equal.rows(tmp_path / "here" / "run")
    assert equal.rows(folder) == [r for r in rows if r["update"] > begin]
    lines = [(tmp_path / p / "probe").read_text().splitlines() for p in ("here", "there")]
    assert lines[1] == lines[0][begin:]  # rates and draws
    assert not (folder / "checkpoints").exists()
    last = next(at.whole())
    assert list(equal.differ("model", store.load(equal.newest(tmp_path / "here" / "run"), MODEL),
                             store.load(last, MODEL))) == []  # fmt: skip

    # No secret is in what was written, and yet the tools find the bucket.
    config = store.load(last, STATE)["config"]["run"]
    assert config["checkpoints"] == url and s3.SECRET not in json.dumps(config)
    for path in filter(Path.is_file, folder.rglob("*")):
        assert s3.SECRET.encode() not in path.read_bytes(), path
    assert s3.SECRET not in again.output
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    start = find.find_start(find.run_folder(str(folder)), 31, "auto").saved
    assert start is not None and start.path == last.path
    monkeypatch.chdir(there)
    assert run(words(server, url, "only=test", f"weights={last.path}")) == 0
    assert json.loads((folder / "test.json").read_text())["weights"] == last.path.name


def test_ck_j_another_configuration_is_refused(tmp_path: Path, server: s3.Server, url: str) -> None:
    run = settings(server, url)
    assert go(tmp_path / "a", run, At("on_step", 4)).code == KILLED
    before = server.keys(url)
    ended = go(tmp_path / "b", run, seed=1)
    assert ended.code == 1 and "ConfigError: run.checkpoints" in ended.output
    assert "seed: 0 -> 1" in ended.output
    assert server.keys(url) == before
    ended = go(tmp_path / "b", {**run, "resume": "never"}, seed=1)
    assert ended.code == 0, ended.output
    assert f"old-1/{store.folder_name(3, 1)}/{MODEL}" in server.keys(url)
    assert r1.lives(probe_of(tmp_path / "b"))[-1][0]["update"] == 1
    assert_eq(undisturbed(seed=1, save=SAVE), finished(server, url, tmp_path / "b"))


def test_a_url_is_the_start_of_another_run(tmp_path: Path, server: s3.Server, url: str) -> None:
    assert go(tmp_path / "a", settings(server, url), At("on_step", 14)).code == KILLED
    start = f"{url}/{store.folder_name(12, 1)}"
    run = {"resume": start, "storage_options": server.options}
    ended = go(tmp_path / "b", run)  # its own checkpoints are in its folder
    assert ended.code == 0, ended.output
    assert f"continuing from {start}" in ended.output
    saved = equal.newest(tmp_path / "b")
    assert [origin["path"] for origin in saved.manifest["origins"]] == [start]
    weights = [store.load(s, MODEL) for s in (equal.newest(undisturbed(save=SAVE)), saved)]
    assert list(equal.differ("model", *weights)) == []
    ended = go(tmp_path / "b", run)  # and again: nothing is left to do
    assert ended.code == 0 and r1.lives(probe_of(tmp_path / "b"))[1:] == [[]]


# --- what is wrong is said before data is read ---


def test_a_bucket_that_is_not_there(tmp_path: Path, server: s3.Server) -> None:
    cli.folder(tmp_path)
    marker = tmp_path / "read"
    asked = words(server, "s3://no-such-bucket/a", f"data.train.dataset.marker={marker}")
    ended = process.run(command.main, tmp_path, asked, {})
    assert ended.code == 2, ended.output
    assert "run.checkpoints: s3://no-such-bucket/a cannot be reached" in ended.output
    assert not marker.exists()


def test_a_server_that_does_not_answer(server: s3.Server) -> None:
    wire = s3.Wire(server.port)
    wire.cut()
    away = store.Store(Url("s3://bucket/a", s3.options(wire.port)))
    with pytest.raises(ConfigError, match=r"run\.checkpoints: s3://bucket/a cannot be reached"):
        away.reach("run.checkpoints")
    with pytest.raises(CheckpointError, match="cannot be read now"):
        away.names()


def reach(port: int) -> None:
    options = s3.options(port)
    options["config_kwargs"]["read_timeout"] = 0.2
    store.Store(Url("s3://bucket/a", options)).reach("run.checkpoints")


def test_a_server_that_falls_silent() -> None:
    """It takes the connection and says nothing: an error when the time is over, not a hang."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ended = process.run(reach, mute.getsockname()[1])
    assert ended.code == 1
    assert "ConfigError: run.checkpoints: s3://bucket/a cannot be reached" in ended.output
    assert "Read timeout" in ended.output


def test_what_a_network_fails_with_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the tracebacks of all that lies between: those are in ``log.txt``."""

    def job() -> int:
        raise CheckpointError("s3://bucket/a cannot be written: refused") from OSError("refused")

    assert exit_code(job) == 1
    shown = "CheckpointError: s3://bucket/a cannot be written: refused\n"
    assert capsys.readouterr().err == shown


def test_two_processes_at_one_place(tmp_path: Path, server: s3.Server, url: str) -> None:
    """The one that has started last saves; the other is told at its next save."""
    first, second = tmp_path / "first", tmp_path / "second"
    run, told = settings(server, url), tmp_path / "told"
    running = process.start(
        r1.train, first, probe_of(first), run=run, hooks={"wait": CutAt(5, told)}, save=SAVE
    )
    while not told.exists():
        assert process.alive(running.pid)
        time.sleep(0.005)
    ended = go(second, run)
    assert ended.code == 0, ended.output
    before = server.keys(url)
    told.unlink()
    ended = running.wait()
    assert ended.code == 1
    assert str(second) in ended.output and "nothing was overwritten" in ended.output
    assert server.keys(url) == before
