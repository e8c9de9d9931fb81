"""The store, wherever checkpoints lie: the same promises in a folder and behind fsspec."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import phaseloop
from phaseloop.engine.checkpoint import local, reading, store
from phaseloop.engine.checkpoint.draws import let_draw_apart
from phaseloop.engine.checkpoint.remote import OWNER, Remote
from phaseloop.engine.checkpoint.store import MANIFEST, Saved, Store, folder_name, verified
from phaseloop.engine.errors import CheckpointError, ConfigError, DamagedError
from phaseloop.engine.urls import Place, Url, place

PARTS = {"model.pt": {"w": torch.arange(6.0)}, "state.pt": {"updates": 3, "nothing": None}}


class Raw:
    """What lies in a place, seen past the store.

    Args:
        folder: the place.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.fs, self.root = fsspec.core.url_to_fs(str(folder))

    def all(self) -> list[str]:
        return sorted(path[len(self.root) + 1 :] for path in self.fs.find(self.root))

    def read(self, key: str) -> bytes:
        content: bytes = self.fs.cat_file(f"{self.root}/{key}")
        return content

    def write(self, key: str, content: bytes) -> None:
        self.fs.makedirs(f"{self.root}/{key}".rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{key}", content)

    def remove(self, key: str) -> None:
        self.fs.rm_file(f"{self.root}/{key}")


@pytest.fixture(params=["folder", "file", "fsspec", "memory"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Raw]:
    """A new place: a folder, by its path and as a URL; the same through fsspec; memory."""
    folder: Place = {
        "folder": lambda: place(str(tmp_path / "checkpoints")),
        "file": lambda: place(f"file://{tmp_path}/checkpoints"),
        "fsspec": lambda: Url(f"file://{tmp_path}/checkpoints"),
        "memory": lambda: place(f"memory://{uuid.uuid4().hex}/checkpoints"),
    }[request.param]()
    yield Raw(folder)
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def write(raw: Raw, updates: int, save: int = 1, parts: Any = PARTS) -> Saved:
    return Store(raw.folder).write(folder_name(updates, save), parts, {"updates": updates})


def same_parts(saved: Saved) -> bool:
    model, state = store.load(saved, "model.pt"), store.load(saved, "state.pt")
    return torch.equal(model["w"], PARTS["model.pt"]["w"]) and state == PARTS["state.pt"]


def test_what_was_written_is_read(raw: Raw) -> None:
    checkpoints = Store(raw.folder)
    assert not checkpoints.exists() and checkpoints.names() == []
    assert list(checkpoints.whole()) == [] and checkpoints.set_aside_before() == []
    saved = write(raw, 3)
    assert saved.position == (3, 1) and saved.path == raw.folder / folder_name(3, 1)
    again = verified(saved.path)
    assert again == saved and same_parts(again)
    assert verified(str(saved.path)).manifest == saved.manifest
    assert raw.all() == sorted(f"{saved.path.name}/{file}" for file in [*PARTS, MANIFEST])
    assert checkpoints.exists()


def test_newest_first(raw: Raw) -> None:
    for updates, save in [(10, 1), (2, 1), (10, 2), (1, 1)]:
        write(raw, updates, save)
    assert [s.position for s in Store(raw.folder).whole()] == [(10, 2), (10, 1), (2, 1), (1, 1)]


def test_the_manifest_says_what_wrote_it(raw: Raw) -> None:
    manifest = json.loads(raw.read(f"{write(raw, 3).path.name}/{MANIFEST}"))
    assert set(manifest) == {"updates", "name", "format", "phaseloop", "files", "sha256"}
    assert manifest["phaseloop"] == phaseloop.__version__
    assert manifest["name"] == folder_name(3, 1) and manifest["format"] == 1


def test_foreign_files_are_no_checkpoints_and_stay(raw: Raw) -> None:
    saved = write(raw, 1)
    foreign = ["notes.txt", f"old/{folder_name(9, 1)}/{MANIFEST}", "update_1-1/x", "a\nb"]
    for key in foreign:
        raw.write(key, b"mine")
    checkpoints = Store(raw.folder)
    checkpoints.take("a test")
    assert checkpoints.names() == [saved.path.name]
    assert set(foreign) <= set(raw.all())


def test_what_was_cut_short_is_no_checkpoint_and_is_cleaned(raw: Raw) -> None:
    """All files of a checkpoint, but where there is no rename its manifest; else not renamed."""
    saved = write(raw, 1)
    name, draft = folder_name(2, 1), not isinstance(raw.folder, Url)
    left = f".writing-{name}" if draft else name
    for file in [*PARTS, *([MANIFEST] if draft else [])]:
        raw.write(f"{left}/{file}", raw.read(f"{saved.path.name}/{file}"))
    checkpoints = Store(raw.folder)
    assert checkpoints.names() == [saved.path.name]
    write(raw, 2)  # is not in its way
    assert checkpoints.names() == [saved.path.name, name]
    checkpoints.remove(name)
    raw.write(f"{left}/model.pt", b"")
    checkpoints.clean()
    assert [key for key in raw.all() if name in key] == []
    assert checkpoints.names() == [saved.path.name]


def test_a_checkpoint_is_never_written_over(raw: Raw) -> None:
    first, before = write(raw, 1), raw.all()
    with pytest.raises(CheckpointError, match=r"update_000000001-1 .*nothing was overwritten"):
        write(raw, 1, parts={"model.pt": {"w": torch.zeros(1)}})
    assert verified(first.path) == first and raw.all() == before


class Cut(BaseException):
    """A kill, as far as code that is being run can be killed."""


def cut(patch: pytest.MonkeyPatch, number: int, *places: tuple[Any, str], error: Any = Cut) -> None:
    """The ``number``-th call of these functions, counted together, raises."""
    count = 0

    def wrap(function: Callable[..., Any]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                raise error
            return function(*args, **options)

        return call

    for owner, name in places:
        patch.setattr(owner, name, wrap(getattr(owner, name)))


def steps(raw: Raw) -> list[tuple[Any, str]]:
    """The functions that change what lies there."""
    if isinstance(raw.folder, Url):
        names = ("open", "pipe_file", "rm_file", "rm", "cp_file", "makedirs")
        return [(raw.fs, name) for name in names]
    return [(os, name) for name in ("open", "fsync", "rename", "mkdir", "rmdir", "unlink")]


@pytest.mark.parametrize("number", range(1, 12))
def test_removing_is_cut_at_any_instant(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kept, doomed = write(raw, 2), write(raw, 1)
    with monkeypatch.context() as patch:
        cut(patch, number, *steps(raw))
        with contextlib.suppress(Cut):
            Store(raw.folder).remove(doomed.path.name)
    found = list(Store(raw.folder).whole(set_aside=False))
    assert found in ([kept, doomed], [kept])
    assert Store(raw.folder).names() == sorted(s.path.name for s in found)
    Store(raw.folder).remove(doomed.path.name)
    Store(raw.folder).clean()
    assert {key.split("/")[0] for key in raw.all()} == {kept.path.name}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "I/O error")])
@pytest.mark.parametrize("number", range(1, 11))
def test_a_write_that_fails_anywhere_leaves_nothing(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, number: int, error: OSError
) -> None:
    """A failed flush is a failure too, and never tried again as if it had been none."""
    before = write(raw, 1)
    with monkeypatch.context() as patch:
        cut(patch, number, *steps(raw), error=error)
        try:
            written = write(raw, 2)
        except CheckpointError as failed:
            written = None
            assert folder_name(2, 1) in str(failed) and str(error) in str(failed)
    if written is None:
        assert {key.split("/")[0] for key in raw.all()} == {before.path.name}
        write(raw, 2)
    assert [saved.position[0] for saved in Store(raw.folder).whole()] == [2, 1]


def test_setting_aside_keeps_everything(raw: Raw) -> None:
    checkpoints = Store(raw.folder)
    places = []
    for _ in range(3):
        write(raw, 1)
        places.append(checkpoints.set_aside(folder_name(1, 1)))
    assert len(set(places)) == 3 and all(same_parts(verified(p)) for p in places)
    assert checkpoints.names() == []
    assert checkpoints.set_aside_before() == [p.name for p in places]


def test_an_old_run_is_put_aside_whole(raw: Raw) -> None:
    checkpoints = Store(raw.folder)
    for number in (1, 2):
        for updates in (1, 2):
            write(raw, updates)
        checkpoints.set_aside(folder_name(1, 1))
        old = checkpoints.put_old_aside()
        assert old == raw.folder / f"old-{number}"
        assert same_parts(verified(old / folder_name(2, 1)))
        assert same_parts(verified(old / "set_aside" / folder_name(1, 1)))
        assert checkpoints.names() == checkpoints.set_aside_before() == []


# --- damage ---


def flip(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


DAMAGES: dict[str, tuple[Callable[[Raw, str, str], None], str]] = {
    "manifest cut off": (lambda raw, name, _: raw.write(
        f"{name}/{MANIFEST}", raw.read(f"{name}/{MANIFEST}")[:-2]), "no readable manifest"),
    "manifest empty": (lambda raw, name, _: raw.write(f"{name}/{MANIFEST}", b""), "no readable"),
    "manifest changed": (lambda raw, name, _: raw.write(
        f"{name}/{MANIFEST}",
        raw.read(f"{name}/{MANIFEST}").replace(b'"updates": 2', b'"updates": 3'),
    ), "manifest.json was changed"),
    "manifest of another": (lambda raw, name, other: raw.write(
        f"{name}/{MANIFEST}", raw.read(f"{other}/{MANIFEST}")), "is that of update_000000001-1"),
    "all of another": (lambda raw, name, other: [raw.write(
        f"{name}/{file}", raw.read(f"{other}/{file}")) for file in [*PARTS, MANIFEST]] and None,
        "is that of update_000000001-1"),
    "file missing": (lambda raw, name, _: raw.remove(f"{name}/state.pt"), "lacks state.pt"),
    "file empty": (lambda raw, name, _: raw.write(f"{name}/model.pt", b""), "has 0 bytes, not"),
    "byte flipped": (lambda raw, name, _: raw.write(
        f"{name}/model.pt", flip(raw.read(f"{name}/model.pt"))), "is not what was written"),
    "file too much": (lambda raw, name, _: raw.write(f"{name}/extra.pt", b""), "extra.pt is no "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_passed_over_and_set_aside(
    raw: Raw, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = write(raw, 1), write(raw, 2)
    do, said = DAMAGES[damage]
    do(raw, bad.path.name, good.path.name)
    with pytest.raises(DamagedError, match=said) as error:
        verified(bad.path)
    assert str(bad.path) in str(error.value)
    assert [s.position[0] for s in Store(raw.folder).whole(set_aside=False)] == [1]
    assert Store(raw.folder).names() == [good.path.name, bad.path.name]
    assert list(Store(raw.folder).whole()) == [good]
    assert Store(raw.folder).set_aside_before() == [bad.path.name]
    assert str(error.value) in caplog.text


def test_hidden_files_are_no_damage(raw: Raw) -> None:
    saved = write(raw, 1)
    raw.write(f"{saved.path.name}/.DS_Store", b"")
    assert verified(saved.path) == saved


def test_what_cannot_be_set_aside_is_said(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    write(raw, 1)
    bad = write(raw, 2)
    raw.write(f"{bad.path.name}/model.pt", b"")
    read_only = OSError(30, "Read-only file system")
    for owner, name in [(raw.fs, "cp_file")] if isinstance(raw.folder, Url) else [(os, "rename")]:
        cut(monkeypatch, 1, (owner, name), error=read_only)
    with pytest.raises(CheckpointError, match=r"0 bytes.*set_aside.*Read-only.*writable") as error:
        list(Store(raw.folder).whole())
    assert not isinstance(error.value, DamagedError)  # else it would be passed over in silence


# --- the format ---


def sealed(raw: Raw, saved: Saved, **changes: Any) -> None:
    manifest = {k: v for k, v in {**saved.manifest, **changes}.items() if v is not None}
    raw.write(f"{saved.path.name}/{MANIFEST}", json.dumps(store.seal(manifest)).encode())


def test_a_newer_format_is_refused_and_not_set_aside(raw: Raw) -> None:
    write(raw, 1)
    saved = write(raw, 2)
    sealed(raw, saved, format=store.FORMAT + 1, phaseloop="7.1")
    said = rf"format {store.FORMAT + 1}, written by phaseloop 7\.1.*{phaseloop.__version__}"
    with pytest.raises(CheckpointError, match=said):
        list(Store(raw.folder).whole())
    assert len(Store(raw.folder).names()) == 2


def test_an_older_manifest_is_read(raw: Raw) -> None:
    saved = write(raw, 2)
    sealed(raw, saved, name=None, phaseloop=None)
    assert same_parts(verified(saved.path))


def test_every_format_up_to_now_has_a_reader() -> None:
    assert sorted(reading._READERS) == list(range(1, store.FORMAT + 1))


# --- only behind fsspec ---


@pytest.fixture
def far(tmp_path: Path) -> Raw:
    return Raw(Url(f"file://{tmp_path}/far"))


def test_what_is_loaded_is_what_was_verified(far: Raw) -> None:
    saved = verified(write(far, 1).path)
    for file in PARTS:
        far.write(f"{saved.path.name}/{file}", b"something else by now")
    assert same_parts(saved) and same_parts(saved)  # and again


def test_an_earlier_process_is_told_that_another_has_started(far: Raw) -> None:
    first, second = Store(far.folder), Store(far.folder)
    first.take("process 1 on here, with the run folder a,")
    first.write(folder_name(1, 1), PARTS, {})
    second.take("process 2 on there, with the run folder b,")
    before = far.all()
    with pytest.raises(CheckpointError, match=r"process 2 on there.*folder b.*run\.checkpoints"):
        first.write(folder_name(2, 1), PARTS, {})
    assert far.all() == before
    second.write(folder_name(2, 1), PARTS, {})
    assert second.names() == [folder_name(1, 1), folder_name(2, 1)]


@pytest.mark.parametrize("name", [folder_name(1, 1), folder_name(2, 1)])
def test_another_that_starts_during_an_upload(
    far: Raw, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first is told. Should both be at the same name, a mixture of them is never used."""
    first, second = Store(far.folder), Store(far.folder)
    first.take("first")
    save = torch.save
    began = []

    def save_and_start_another(*args: Any) -> None:
        save(*args)
        if not began:
            began.append(True)
            second.take("second")
            second.write(name, PARTS, {})

    monkeypatch.setattr(torch, "save", save_and_start_another)
    with pytest.raises(CheckpointError, match="nothing was overwritten"):
        first.write(folder_name(1, 1), {"model.pt": {"w": torch.zeros(300)}}, {})
    assert second.names() == [name]
    found = list(second.whole())
    assert all(map(same_parts, found))
    assert len(found) == 1 or second.set_aside_before() == [folder_name(1, 1)]


def test_an_upload_that_lost_bytes_gets_no_manifest(
    far: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Remote.finish

    def lose(self: Remote, name: str, *args: Any) -> None:
        far.write(f"{name}/model.pt", far.read(f"{name}/model.pt")[:-1])
        put(self, name, *args)

    monkeypatch.setattr(Remote, "finish", lose)
    with pytest.raises(CheckpointError, match="were sent"):
        write(far, 1)
    assert far.all() == []


def test_errors_of_other_packages_are_told_as_ours(
    far: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's, for one, are no OSError."""

    class FarAwayError(Exception):
        pass

    write(far, 1)
    for name, use in {
        "find": Store(far.folder).names,
        "open": lambda: verified(far.folder / folder_name(1, 1)),
        "rm_file": lambda: Store(far.folder).remove(folder_name(1, 1)),
        "pipe_file": lambda: Store(far.folder).take("a test"),
    }.items():
        with monkeypatch.context() as patch:
            cut(patch, 1, (far.fs, name), error=FarAwayError("no route"))
            with pytest.raises(CheckpointError, match="FarAwayError: no route"):
                use()
    with monkeypatch.context() as patch:
        cut(patch, 1, (far.fs, "pipe_file"), error=FarAwayError("no route"))
        with pytest.raises(ConfigError, match=r"run\.checkpoints: .*no route"):
            Store(far.folder).reach("run.checkpoints")


def test_a_single_file_is_loaded_from_a_url(far: Raw) -> None:
    write(far, 1)
    found = store.safe_load(far.folder / folder_name(1, 1) / "model.pt")
    assert torch.equal(found["w"], PARTS["model.pt"]["w"])
    with pytest.raises(CheckpointError, match="nowhere"):
        store.safe_load(far.folder / "nowhere.pt")


def test_the_owner_is_no_trace_of_a_run(far: Raw) -> None:
    checkpoints = Store(far.folder)
    checkpoints.reach("run.checkpoints")
    checkpoints.take("a test")
    assert far.all() == [OWNER] and not checkpoints.exists()


def test_waiting_between_tries_draws_nothing_of_the_training() -> None:
    """botocore waits for random times, which it would draw from Python's own generator."""
    fsspec.get_filesystem_class("s3")
    from botocore import retryhandler
    from botocore.retries import standard

    let_draw_apart()
    state = random.getstate()
    retryhandler.delay_exponential("rand", 2, 3)
    backoff = standard.ExponentialBackoff()
    assert backoff._random is not random.random
    backoff.delay_amount(standard.RetryContext(attempt_number=1))
    assert random.getstate() == state


# --- only in a folder ---


def test_an_unreadable_folder_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must not begin anew because its disk is away for a moment."""
    saved = Store(tmp_path).write(folder_name(1, 1), PARTS, {})
    refused = PermissionError(13, "Permission denied")
    for owner, name, use in [
        (os, "scandir", Store(tmp_path).names),
        (os, "scandir", Store(tmp_path).clean),
        (os, "scandir", Store(tmp_path).set_aside_before),
        (os, "stat", Store(tmp_path).exists),
        (os, "listdir", lambda: verified(saved.path)),
    ]:
        with monkeypatch.context() as patch:
            cut(patch, 1, (owner, name), error=refused)
            with pytest.raises(CheckpointError, match=r"cannot be read now.*Permission denied"):
                use()  # type: ignore[operator]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        Store(tmp_path / "file").names()


def test_a_checkpoint_that_is_a_file_is_set_aside(tmp_path: Path) -> None:
    good = Store(tmp_path).write(folder_name(1, 1), PARTS, {})
    (tmp_path / folder_name(2, 1)).write_text("what is this?")
    with pytest.raises(DamagedError, match="it is a file"):
        verified(tmp_path / folder_name(2, 1))
    assert list(Store(tmp_path).whole()) == [good]
    assert Store(tmp_path).set_aside_before() == [folder_name(2, 1)]


def test_links_to_other_disks_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("disk")
    checkpoints = Store(tmp_path / "checkpoints")
    saved = checkpoints.write(folder_name(1, 1), PARTS, {})
    os.rename(tmp_path / "disk" / saved.path.name, tmp_path / saved.path.name)
    (tmp_path / "disk" / saved.path.name).symlink_to(tmp_path / saved.path.name)
    assert list(checkpoints.whole()) == [saved]
    checkpoints.remove(saved.path.name)  # the link goes, what it leads to is not ours
    assert os.listdir(tmp_path / "disk") == []
    assert same_parts(verified(tmp_path / saved.path.name))


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    checkpoints = Store(tmp_path / "checkpoints")
    checkpoints.write(folder_name(1, 1), PARTS, {})
    local.remove(tmp_path / "checkpoints")
    checkpoints.remove(folder_name(1, 1))
    saved = checkpoints.write(folder_name(2, 1), PARTS, {})
    assert list(checkpoints.whole()) == [saved]


def test_no_clock_says_which_is_the_newest(tmp_path: Path) -> None:
    """Set back or forward, it changes nothing."""
    for updates, when in [(1, 2e9), (2, 0.0), (3, 1e9)]:
        saved = Store(tmp_path).write(folder_name(updates, 1), PARTS, {})
        for path in [saved.path, *saved.path.iterdir()]:  # type: ignore[union-attr, list-item]
            os.utime(path, (when, when))
    assert [s.position[0] for s in Store(tmp_path).whole()] == [3, 2, 1]


def test_a_read_only_folder_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path / "new").reach("run.checkpoints")
    assert not (tmp_path / "new").exists()  # nothing is left behind
    cut(monkeypatch, 1, (os, "mkdir"), error=OSError(30, "Read-only file system"))
    with pytest.raises(ConfigError, match=r"run\.checkpoints: .*Read-only file system"):
        Store(tmp_path).reach("run.checkpoints")


def test_one_thread_writes_while_another_asks_for_names(tmp_path: Path) -> None:
    checkpoints = Store(tmp_path)
    names = [folder_name(updates, 1) for updates in range(1, 11)]

    def work() -> None:
        for name in names:
            checkpoints.write(name, PARTS, {})

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        found = checkpoints.names()
        assert found == names[: len(found)]
    thread.join()
    assert len(list(checkpoints.whole())) == len(names)
