"""The format: a checkpoint of each released one goes on, for ever, to the end that it had then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import STATE
from tests.golden import checkpoint, machine
from tests.rigs import process

LARGEST = 60 * 1024
"""Bytes of a checkpoint that is kept in the project."""


def numbers(end: dict[str, Any]) -> dict[str, list[float]]:
    """All exact numbers of an end by name."""
    found = {"draws": [end["draws"]]}
    for part in ("metrics", "best"):
        found.update({f"{part} {name}": [value] for name, value in end[part].items()})
    found.update({f"tensor {name}": values for name, values in end["tensors"].items()})
    return {name: [float.fromhex(x) for x in values] for name, values in found.items()}


def resumed(tmp_path: Path, golden: str) -> tuple[Path, process.Ended]:
    """A copy of a golden run, and its command line brought to the end."""
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint.FOLDER / golden, folder)
    return folder, process.run(checkpoint.command, folder)


@pytest.mark.parametrize("golden", checkpoint.FORMATS)
def test_a_golden_run_goes_on_to_the_end_it_had(tmp_path: Path, golden: str) -> None:
    """To the bit on the recorded kind of machine; else to last bits: a relative 1e-5, as float32's
    own 6e-8 has grown over eight updates; counts and draws are exact everywhere."""
    folder, ended = resumed(tmp_path, golden)
    assert ended.value == 0, ended.output
    log = (folder / "run" / "log.txt").read_text()
    assert f"update_{checkpoint.STOPPED:09d}" in log, "it was begun anew"
    assert "set_aside" not in log
    recorded = json.loads((folder / "expected.json").read_text())
    expected, end = recorded["end"], checkpoint.end_of(folder)
    for name in ("updates", "scale", "rows", "draws"):
        assert end[name] == expected[name], name
    assert expected["updates"] == checkpoint.LAST
    there, here = numbers(expected), numbers(end)
    assert here.keys() == there.keys()
    for name, values in there.items():
        if recorded["machine"] == machine():
            assert here[name] == values, name
        else:
            assert here[name] == pytest.approx(values, rel=1e-5, abs=1e-7), name


def test_it_is_small_and_names_no_machine() -> None:
    for golden in checkpoint.FORMATS:
        files = [p for p in (checkpoint.FOLDER / golden / "run").rglob("*") if p.is_file()]
        assert sum(path.stat().st_size for path in files) < LARGEST
        assert all(str(Path.home()).encode() not in path.read_bytes() for path in files)
        assert not any(b"/tmp/" in path.read_bytes() for path in files)


def test_this_format_has_its_golden_run() -> None:
    assert f"format_{store.FORMAT}" in checkpoint.FORMATS


def test_a_checkpoint_that_lacks_what_later_versions_add_goes_on(tmp_path: Path) -> None:
    """Keys of the configuration at their defaults, as if this version had brought them."""
    folder = tmp_path / "copy"
    golden = checkpoint.FOLDER / f"format_{store.FORMAT}"
    shutil.copytree(golden, folder)
    checkpoints = store.Store(folder / "run" / "checkpoints")
    (name,) = checkpoints.names()
    saved = store.verified(checkpoints.folder / name)
    parts = {file: store.load(saved, file) for file in saved.manifest["files"]}
    config = parts[STATE]["config"]
    # A root key, one of a section, of a set of data; a whole section.
    for place, key in ((config, "freeze"), (config["gradients"], "norm_type"),
                       (config["data"]["train"], "drop_last"), (config, "debug")):  # fmt: skip
        del place[key]
    facts = {key: saved.manifest[key] for key in ("updates", "epoch", "origins")}
    shutil.rmtree(saved.path)
    checkpoints.write(name, parts, facts)
    ended = process.run(checkpoint.command, folder)
    assert ended.value == 0, ended.output
    assert checkpoint.end_of(folder)["tensors"] == _end(tmp_path, golden)["tensors"]


def _end(tmp_path: Path, golden: Path) -> dict[str, Any]:
    """The end of the golden run on this machine."""
    folder, ended = resumed(tmp_path / "whole", golden.name)
    assert ended.value == 0, ended.output
    return checkpoint.end_of(folder)


def test_one_that_lacks_a_key_that_is_not_at_its_default_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint.FOLDER / f"format_{store.FORMAT}", folder)
    ended = process.run(checkpoint.command, folder, "data.train.drop_last=true")
    assert ended.value == 2
    assert "data.train.drop_last: False -> True" in ended.output


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint.FOLDER / f"format_{store.FORMAT}", folder)
    checkpoints = store.Store(folder / "run" / "checkpoints")
    manifest = checkpoints.folder / checkpoints.names()[0] / store.MANIFEST
    later = store.seal({**json.loads(manifest.read_text()), "format": store.FORMAT + 1})
    manifest.write_text(json.dumps(later))
    ended = process.run(checkpoint.command, folder)
    assert ended.value == 1
    assert f"has format {store.FORMAT + 1}" in ended.output
    assert manifest.exists()  # and is left where it is
