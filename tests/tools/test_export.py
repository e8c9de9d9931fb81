"""Exporting: from a checkpoint to one file, and back through ``weights``, bit for bit."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import phaseloop
from phaseloop import ConfigError, Data, Phases, Run, Task, Trainer, Weights, load_weights
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.hooks.average import Average
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.tools.export import export, run
from phaseloop.tools.run import DONE, ERROR, WRONG_CONFIG
from tests.rigs import cli, equal, process, r1
from tests.rigs.equal import newest


def bits(a: Any, b: Any) -> list[str]:
    return list(equal.differ("state", dict(a), dict(b)))


@pytest.fixture(scope="module")
def averaged() -> Path:
    """A run made in Python, with averages."""
    folder = process.scratch() / "averaged"
    if not folder.exists():
        save = {"keep_last": 2}
        process.result(r1.train, folder, epochs=2, save=save, hooks={"ema": Average(decay=0.5)})
    return folder


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_out_and_back_in(averaged: Path, tmp_path: Path, ending: str, kind: str) -> None:
    saved = newest(averaged)
    averages = equal.state_of(saved)["averages"]["ema"]
    wanted = store.load(saved, MODEL) if kind == "raw" else averages
    out = tmp_path / f"model.{ending}"
    done = export(averaged, out, averages=kind)
    assert done.weights == kind and done.checkpoint == saved.path
    model = r1.network(5)
    assert len(load_weights(model, str(out)).loaded) == len(wanted) == done.tensors
    assert bits(wanted, model.state_dict()) == []
    # And by whoever has nothing but torch, or safetensors.
    loads = safetensors.torch.load_file if ending == "safetensors" else torch.load
    assert bits(wanted, loads(out)) == []
    assert os.listdir(tmp_path) == [out.name]
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_the_file_says_about_itself(averaged: Path, tmp_path: Path) -> None:
    saved = newest(averaged)
    export(saved.path, tmp_path / "m.safetensors", averages="ema")
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "phaseloop": phaseloop.__version__,
            "run": averaged.name,
            "checkpoint": saved.path.name,
            "updates": str(2 * r1.UPDATES),
            "sha256": saved.manifest["sha256"],
            "weights": "averages of hooks.ema",
        }


def test_which_checkpoint(averaged: Path, tmp_path: Path) -> None:
    names = store.Store(averaged / "checkpoints").names()
    assert len(names) == 2
    done = export(averaged, tmp_path / "old.pt", which=names[0], averages="raw")
    assert done.checkpoint.name == names[0]
    raw = store.load(store.verified(averaged / "checkpoints" / names[0]), MODEL)
    assert bits(raw, torch.load(tmp_path / "old.pt")) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_another_type_of_number(averaged: Path, tmp_path: Path, dtype: str) -> None:
    export(averaged, tmp_path / "half.safetensors", averages="raw", dtype=dtype)
    raw = store.load(newest(averaged), MODEL)
    wanted = {name: value.to(getattr(torch, dtype)) for name, value in raw.items()}
    assert bits(wanted, safetensors.torch.load_file(tmp_path / "half.safetensors")) == []


def test_what_was_tested_is_exported(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A run from YAML knows; without an average it is the raw weights; both are said."""
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    from phaseloop.tools.run import run as train

    words = ["config=tiny", "phases.epochs=1"]
    ema = "hooks.ema={name: average, decay: 0.5}"
    for name, more, kind in (
        ("plain", [], "raw weights"),
        ("ema", [ema], "averages of hooks.ema"),
        ("untested", [ema, "hooks.ema.test=false"], "raw weights"),
    ):
        assert train([*words, f"run.dir={name}", *more]) == DONE
        capsys.readouterr()
        assert run([name, f"{name}.safetensors"]) == DONE
        assert f"exported    {kind} of {name}/checkpoints/update_" in capsys.readouterr().out
    far = f"memory://{tmp_path.name}"  # the run's folder knows where its checkpoints lie
    assert train([*words, "run.dir=far", f"run.checkpoints={far}"]) == DONE
    capsys.readouterr()
    assert run(["far", "far.pt"]) == DONE
    assert f"exported    raw weights of {far}/update_" in capsys.readouterr().out


class Shared(nn.Module):
    """Tied weights, another layout in memory, and a buffer that is part of another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        memory = torch.randn(6)
        self.register_buffer("whole", memory)
        self.register_buffer("part", memory[:4])
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(self.a(x)))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Shared()
    task = Task(
        model=model, criterion=nn.CrossEntropyLoss(), phases=Phases(epochs=1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(r1.Samples(), 4), run=Run(dir=str(tmp_path / "shared"), threads=1),
    )  # fmt: skip
    Trainer(task, {"ema": Average(decay=0.5), "checkpoint": Checkpoint()}).train()
    return tmp_path / "shared"


@pytest.mark.parametrize("kind", ["raw", "ema"])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_tied_weights_and_layouts(shared: Path, tmp_path: Path, kind: str, ending: str) -> None:
    saved = newest(shared)
    raw = store.load(saved, MODEL)
    wanted = dict(raw)
    if kind == "ema":
        averages = equal.state_of(saved)["averages"]["ema"]
        assert "b.weight" not in averages
        wanted = {**averages, "b.weight": averages["a.weight"]}
    out = tmp_path / f"m.{ending}"
    done = export(shared, out, averages=kind)
    assert done.tied == {"b.weight": "a.weight"} and done.tensors == len(raw) - 1
    model = Shared()
    report = load_weights(model, str(out))
    assert len(report.loaded) == report.total == len(raw)
    assert bits({n: wanted[n] for n in raw}, model.state_dict()) == []
    # From the run itself, without a file in between, it is the same.
    again = Shared()
    load_weights(again, Weights(str(shared), averages=None if kind == "raw" else kind))
    assert bits(model.state_dict(), again.state_dict()) == []
    if ending == "safetensors":  # as safetensors' own function has it, too
        other = Shared()
        safetensors.torch.load_model(other, out, strict=False)  # it takes the part for a tie
        assert bits(model.state_dict(), other.state_dict()) == []


def test_nothing_is_replaced_unasked(averaged: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "m.safetensors"
    out.write_text("mine")
    words = [str(averaged), str(out), "averages=raw"]
    assert run(words) == WRONG_CONFIG
    assert f"force: {out} exists; force=true replaces it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run([*words, "force=true"]) == DONE
    assert safetensors.torch.load_file(out)


def test_a_failing_write_leaves_what_was_there(
    averaged: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "m.pt"
    out.write_text("mine")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run([str(averaged), str(out), "averages=raw", "force=true"]) == ERROR
    assert "No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["m.pt"] and out.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m.pt"], "averages: the run has those of ema: say which, or averages=raw"),
        (["m.pt", "averages=swa"], "averages: "),
        (["m.pt", "averages=swa"], "It has those of: ema"),
        (["m.onnx"], "format: m.onnx does not tell: safetensors or pt"),
        (["m.pt", "format=safetensors"], "format: safetensors does not go with the name m.pt"),
        (["m", "format=zip"], "format: 'zip' is not safetensors or pt"),
        (["m.pt", "dtype=int8"], "dtype: 'int8' is not one of float16, bfloat16"),
        (["m.pt", "which=first"], "which: 'first' is not newest, best or a checkpoint of"),
        (["m.pt", "which=best", "averages=raw"], "which: that run keeps no best checkpoint"),
        (["m.pt", "force=1"], "force: it is true or false"),
        (["m.pt", "more.pt"], "give a run or a checkpoint, and the file to write"),
        (["m.pt", "wich=best"], "wich: there is no such option. Did you mean 'which'? There are:"),
        (["m.pt", "speed=9"], "speed: there is no such option. There are: which, averages,"),
        (["m.pt", "which=best", "which=newest"], "which: is given twice, as 'best' and 'newest'"),
        (["s3://bucket/m.pt"], "out: s3://bucket/m.pt is a URL; the file is written to a disk"),
        (["absent/m.pt", "averages=raw"], "out: there is no folder"),
    ],
)
def test_mistakes(
    averaged: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([str(averaged), *words]) == WRONG_CONFIG
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def damage(checkpoint: Path) -> None:
    data = bytearray((checkpoint / MODEL).read_bytes())
    data[-100] ^= 1
    (checkpoint / MODEL).write_bytes(data)


def test_nothing_is_written_among_checkpoints(
    averaged: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    run_folder = tmp_path / "run"
    shutil.copytree(averaged, run_folder)
    other = tmp_path / "other"
    shutil.copytree(averaged, other)
    (tmp_path / "link").symlink_to(run_folder / "checkpoints")
    (run_folder / "checkpoints" / "below").mkdir()
    checkpoint = newest(run_folder).path
    copied = tmp_path / "copied"
    shutil.copytree(checkpoint, copied)
    monkeypatch.chdir(checkpoint)
    for given in (run_folder, checkpoint):
        for out in (
            checkpoint / MODEL,
            Path(MODEL),
            checkpoint / "mine.pt",
            checkpoint.parent / "mine.pt",
            checkpoint.parent / "below" / "mine.pt",
            tmp_path / "link" / "mine.pt",
            tmp_path / "link" / checkpoint.name / MODEL,
            other / "checkpoints" / "mine.pt",
            newest(other).path / MODEL,
            copied / MODEL,
        ):
            assert run([str(given), str(out), "averages=raw", "force=true"]) == WRONG_CONFIG
            assert f"out: {out} is among checkpoints" in capsys.readouterr().err
    assert newest(run_folder).path == checkpoint and newest(other).path.name == checkpoint.name
    assert not list(tmp_path.rglob("mine.pt"))
    assert run([str(run_folder), str(run_folder / "mine.pt"), "averages=raw"]) == DONE


def test_which_is_the_best_is_not_guessed(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    """What an older checkpoint calls the best may be so no more."""
    folder = tmp_path / "run"
    save = {"keep_last": 2, "keep_best": 1, "metric": "train/loss"}
    process.result(r1.train, folder, epochs=3, save=save)
    out = tmp_path / "m.pt"
    assert run([str(folder), str(out), "which=best"]) == DONE
    names = store.Store(folder / "checkpoints").names()
    damage(folder / "checkpoints" / names[-1])
    out.unlink()
    capsys.readouterr()
    assert run([str(folder), str(out), "which=best"]) == WRONG_CONFIG
    said = capsys.readouterr().err
    assert f"the newest checkpoint notes which is the best, and {names[-1]} is damaged" in said
    assert f"Name one: {', '.join(names[:-1])}" in said and not out.exists()
    caplog.clear()
    assert run([str(folder), str(out), "which=newest"]) == DONE
    assert f"{names[-1]} is damaged: what is taken is {names[-2]}, before it" in caplog.text


def test_a_damaged_checkpoint_is_not_exported(averaged: Path, tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / newest(averaged).path.name
    shutil.copytree(newest(averaged).path, copy)
    damage(copy)
    assert run([str(copy), str(tmp_path / "m.pt"), "averages=raw"]) == WRONG_CONFIG
    assert "is damaged" in capsys.readouterr().err


def test_neither_data_nor_the_models_code_is_needed(averaged: Path, tmp_path: Path) -> None:
    """The real program, in a folder where there is nothing."""
    out = tmp_path / "m.safetensors"
    ended = subprocess.run(
        [sys.executable, str(cli.ROOT / "tools" / "export.py"), str(averaged), str(out),
         "averages=raw"],
        cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == DONE, ended.stderr
    assert ended.stdout.startswith("exported    raw weights of ")
    assert bits(store.load(newest(averaged), MODEL), safetensors.torch.load_file(out)) == []


def test_extra_state_goes_into_a_pt_file_only(tmp_path: Path) -> None:
    facts = {"updates": 1, "epoch": 1, "origins": []}
    parts = {MODEL: {"w": torch.ones(2), "l._extra_state": {"calls": 3}},
             "state.pt": {"averages": {}, "config": {}, "hooks": {}}}  # fmt: skip
    saved = store.Store(tmp_path).write(store.folder_name(1, 1), parts, facts)
    with pytest.raises(ConfigError, match=r"l\._extra_state: safetensors has tensors only"):
        export(saved.path, tmp_path / "m.safetensors")
    export(saved.path, tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt")["l._extra_state"] == {"calls": 3}
