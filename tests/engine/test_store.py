"""The store: writing, verifying, setting aside, removing; what is cut short leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import check_plain
from phaseloop.engine.checkpoint.store import MANIFEST, Store, folder_name, position, verified
from phaseloop.engine.errors import CheckpointError, DamagedError
from tests.rigs import process

PARTS = {"model.pt": {"w": torch.arange(6.0)}, "state.pt": {"updates": 3, "nothing": None}}


def write(folder: Path, updates: int, save: int = 1, parts: Any = PARTS) -> store.Saved:
    return Store(folder).write(folder_name(updates, save), parts, {"updates": updates})


def test_names_sort_as_positions_do() -> None:
    positions = [(0, 1), (3, 1), (3, 2), (3, 11), (20, 1), (10**9, 1), (10**10, 2)]
    assert [position(folder_name(*p)) for p in positions] == positions
    assert folder_name(1200, 2) == "update_000001200-2"


@pytest.mark.parametrize(
    "name", ["", "update_12-1", "update_000000012", "update_000000012-1.2", "xupdate_000000012-1",
             ".writing-update_000000012-1", "update_000000012-1\n"],
)  # fmt: skip
def test_other_names_are_no_checkpoints(name: str) -> None:
    with pytest.raises(CheckpointError, match="not the name of a checkpoint"):
        position(name)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    saved = write(tmp_path / "not" / "there" / "yet", 3)
    assert saved.position == (3, 1)
    again = verified(saved.path)
    assert again == saved
    assert again.manifest["updates"] == 3
    assert torch.equal(store.load(again, "model.pt")["w"], torch.arange(6.0))
    assert store.load(again, "state.pt") == PARTS["state.pt"]
    assert sorted(os.listdir(saved.path)) == sorted([*PARTS, MANIFEST])


def test_newest_first_and_gaps_do_not_matter(tmp_path: Path) -> None:
    for updates, save in [(10, 1), (2, 1), (10, 2), (1, 1)]:
        write(tmp_path, updates, save)
    positions = [saved.position for saved in Store(tmp_path).whole()]
    assert positions == [(10, 2), (10, 1), (2, 1), (1, 1)]


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    for checkpoints in (Store(tmp_path), Store(tmp_path / "none")):
        assert checkpoints.names() == [] and list(checkpoints.whole()) == []
        checkpoints.clean()


def test_leftovers_are_no_checkpoints_and_are_cleaned(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)
    for prefix in (".writing-", ".removing-"):
        leftover = tmp_path / f"{prefix}{folder_name(2, 1)}"
        leftover.mkdir()
        for part in saved.path.iterdir():  # complete, and yet not renamed
            (leftover / part.name).write_bytes(part.read_bytes())
    checkpoints = Store(tmp_path)
    assert checkpoints.names() == [saved.path.name]
    checkpoints.clean()
    assert os.listdir(tmp_path) == [saved.path.name]


def test_a_leftover_does_not_hinder_a_write_of_the_same_name(tmp_path: Path) -> None:
    leftover = tmp_path / f".writing-{folder_name(1, 1)}"
    leftover.mkdir()
    (leftover / "foreign").touch()
    assert sorted(os.listdir(write(tmp_path, 1).path)) == sorted([*PARTS, MANIFEST])


@pytest.mark.parametrize("failing", ["open", "rename", "fsync", "save"])
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = write(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    place = {"open": (store, "_write_part"), "rename": (os, "rename"), "fsync": (os, "fsync"),
             "save": (torch, "save")}[failing]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(CheckpointError, match=r"update_000000002-1 .*No space left"):
            write(tmp_path, 2)
    assert os.listdir(tmp_path) == [before.path.name]
    assert verified(before.path)


def write_more_than_allowed(folder: Path) -> str:
    """In another process, whose files may have 100 kB: what writing more says."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        Store(folder).write(folder_name(1, 1), {"model.pt": {"w": torch.zeros(100_000)}}, {})
    except CheckpointError as error:
        return str(error)
    return "written"


def test_the_systems_own_word_is_told(tmp_path: Path) -> None:
    """Torch hides it behind ``enforce fail at inline_container.cc``."""
    said = process.result(write_more_than_allowed, tmp_path)
    assert said.endswith("could not be written: [Errno 27] File too large")
    assert Store(tmp_path).names() == []


def test_writing_imports_nothing() -> None:
    """A worker that is forked meanwhile could wait for the lock of an import, for ever."""
    code = (
        "import sys, tempfile, torch, pathlib\n"
        "from phaseloop.engine.checkpoint.store import Store, folder_name\n"
        "before = set(sys.modules)\n"
        "parts = {'state.pt': {'a': torch.zeros(3), 'b': torch.nn.Parameter(torch.ones(1)),\n"
        "         'c': torch.float16, 'd': torch.Size([1]), 'e': torch.eye(2).to_sparse()}}\n"
        "Store(pathlib.Path(tempfile.mkdtemp())).write(folder_name(1, 1), parts, {})\n"
        "print(sorted(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    first = write(tmp_path, 1)
    with pytest.raises(CheckpointError):
        write(tmp_path, 1, parts={"model.pt": {"w": torch.zeros(1)}})
    assert verified(first.path) == first
    assert os.listdir(tmp_path) == [first.path.name]


def test_every_byte_counts(tmp_path: Path) -> None:
    """A change of any one byte of any file is found."""
    saved = write(tmp_path, 1, parts={"state.pt": {"a": 1}})
    for file in ("state.pt", MANIFEST):
        path = saved.path / file
        good = path.read_bytes()
        for place in range(0, len(good), 7):
            bad = bytearray(good)
            bad[place] ^= 0x20
            path.write_bytes(bad)
            if file == MANIFEST and _same_json(bad, good):
                continue  # white space between entries
            with pytest.raises(CheckpointError, match=str(saved.path)):
                verified(saved.path)
        path.write_bytes(good)
    assert verified(saved.path) == saved


def _same_json(a: bytes | bytearray, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"sha256": ""}', "", "\x00"])
def test_a_manifest_that_is_none(tmp_path: Path, content: str) -> None:
    saved = write(tmp_path, 1)
    (saved.path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError):
        verified(saved.path)


def test_another_format_is_named(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)
    newer = store.seal({**saved.manifest, "format": store.FORMAT + 1})
    (saved.path / MANIFEST).write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match=rf"format {store.FORMAT + 1}.* {store.FORMAT}"):
        verified(saved.path)


def test_setting_aside_keeps_everything(tmp_path: Path) -> None:
    checkpoints = Store(tmp_path)
    places = []
    for _ in range(3):
        write(tmp_path, 1)
        places.append(checkpoints.set_aside(folder_name(1, 1)))
    assert len(set(places)) == 3
    assert all(verified(place) for place in places)
    assert checkpoints.names() == []


def test_a_link_to_nothing_is_set_aside_and_the_one_before_taken(tmp_path: Path) -> None:
    checkpoints = Store(tmp_path)
    checkpoints.write(folder_name(1, 1), {"model.pt": {}}, {})
    link = tmp_path / folder_name(2, 1)
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(DamagedError, match=r"is a link to .*gone, which is not there"):
        store.verified(link)
    assert next(checkpoints.whole()).position == (1, 1)
    assert (tmp_path / "set_aside" / link.name).is_symlink() and not link.is_symlink()


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)
    checkpoints = Store(tmp_path)
    for _ in range(2):
        checkpoints.remove(saved.path.name)
        assert os.listdir(tmp_path) == []


def test_a_size_is_that_of_the_contents_not_of_what_they_are_cut_from(tmp_path: Path) -> None:
    """A view would be saved with all that it is a view of."""
    saved = write(tmp_path, 1, parts={"model.pt": {"w": torch.zeros(100_000)[:4].clone()}})
    assert saved.manifest["files"]["model.pt"]["bytes"] < 4_000


# --- what is plain ---


class Twist(Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.5, 1j, "text", b"bytes", torch.zeros(2), nn.Parameter(torch.zeros(2)),
        torch.Size([1, 2]), torch.float16, torch.device("cpu"), {"a": {1: [2, (3.0,)]}},
        OrderedDict(a=torch.zeros(())), {1, 2}, {(1, "a"): None}, nn.Linear(2, 2).state_dict(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_plain_is_what_loads_again(tmp_path: Path, value: Any) -> None:
    check_plain(value)
    torch.save({"value": value}, tmp_path / "file")
    store.safe_load(tmp_path / "file")


@pytest.mark.parametrize(
    "value",
    [np.float64(0.5), np.int64(1), np.zeros(2), Path("a"), pytest,
     torch.zeros(2).as_subclass(Twist), type("Text", (str,), {})("a"),
     type("Table", (dict,), {})(), object, nn.ReLU()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda x: {"a": [0, x]}, lambda x: {"a": {1: x}}])
def test_all_else_is_named(value: Any, wrap: Any) -> None:
    with pytest.raises(CheckpointError, match=r"a\.1 is a "):
        check_plain(wrap(value))


def test_a_key_is_looked_at_too() -> None:
    with pytest.raises(CheckpointError, match="a key of a is a numpy"):
        check_plain({"a": {np.int64(1): 0}})


@pytest.mark.parametrize("key", [torch.zeros(1), (1, (nn.Parameter(torch.zeros(1)),))])
def test_a_tensor_as_a_key_is_refused(key: Any) -> None:
    with pytest.raises(CheckpointError, match="a key of a is or has a tensor"):
        check_plain({"a": {key: 0}})
    check_plain({"a": {(1, ("b",)): 0}})


# --- loading ---


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"a": 1}), pickle.dumps(object)])
def test_safe_load_refuses_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        store.safe_load(path)


def test_safe_load_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        store.safe_load(tmp_path / "nowhere.pt")
