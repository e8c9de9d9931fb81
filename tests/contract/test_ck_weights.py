"""CK-g, CK-h, CK-i for initial weights: fine-tuning, on the real command line and from Python."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import (
    Compile,
    ConfigError,
    ModelOptions,
    Precision,
    Trainer,
    Weights,
    load_weights,
    register_model,
)
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.hooks.average import Average
from phaseloop.tools.export import export
from phaseloop.tools.run import DONE
from phaseloop.tools.run import run as run_here
from tests.rigs import cli, equal, process, r1
from tests.rigs.equal import assert_eq, newest, probe_of
from tests.rigs.r1 import At

KILLED = -signal.SIGKILL
CLASSES, OLD_CLASSES = 7, 10


@register_model("seven_classes", replace=True)
class Network(nn.Module):
    """A backbone and a head."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x).relu())


FINE = """\
# @package _global_
defaults: [tiny, _self_]
imports: [tests.rigs.tiny, tests.contract.test_ck_weights]
model: {name: seven_classes, weights: {path: ten.pt}}
hooks: {tensorboard: null, curves: null, progress: null}
phases: {epochs: 1}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cli.folder(tmp_path, fine=FINE)
    torch.manual_seed(1)
    torch.save(Network(OLD_CLASSES).state_dict(), tmp_path / "ten.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- CK-i ---


def test_ck_i_ten_classes_into_seven(here: Path) -> None:
    ended = cli.forked(["config=fine"], here)
    assert ended.returncode == 2
    assert "wrong configuration: model.weights: " in ended.stderr
    assert f"head.weight has [{CLASSES}, 6] here, [{OLD_CLASSES}, 6] there" in ended.stderr
    assert store.Store(here / "runs" / "fine" / "checkpoints").names() == []
    # The report is whole in the log, and it was said before the error.
    assert "backbone.weight" in (here / "runs" / "fine" / "log.txt").read_text()

    ended = cli.forked(["config=fine", "model.weights.allow=['head.*']"], here)
    assert ended.returncode == 0, ended.stderr
    names = list(Network().state_dict())
    loaded = [name for name in names if name.startswith("backbone.")]
    assert f"weights     {len(loaded)} of {len(names)} tensors of the model from ten.pt" in (
        ended.stdout
    )
    log = (here / "runs" / "fine" / "log.txt").read_text()
    assert all(name in log for name in names)


def test_ck_i_a_file_none_of_whose_names_match(here: Path) -> None:
    torch.save({f"old.{n}": v for n, v in Network().state_dict().items()}, "ten.pt")
    ended = cli.forked(["config=fine", "model.weights.allow=['*']"], here)
    assert ended.returncode == 2
    assert "ten.pt has 0 of 4 tensors of the model" in ended.stderr
    assert "remove_prefix: 'old.'" in ended.stderr


# --- CK-g ---


class Bomb:
    """Unpickled as it would like to be, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_ck_g_a_file_that_would_run_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = here / "proof"
    evil = {**Network().state_dict(), "bomb": Bomb(proof)}
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # what some set for old files
    torch.save(evil, "ten.pt")
    ended = cli.run(["config=fine"], here)
    assert ended.returncode == 2
    assert "model.weights.path: ten.pt was not loaded" in ended.stderr
    assert "nothing in it is run" in ended.stderr
    torch.save({"state_dict": evil}, "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match="nothing in it is run"):
        load_weights(Network(), Weights("old.pt", at="state_dict"))
    assert not proof.exists()
    torch.load("ten.pt", weights_only=False)
    assert proof.exists()  # it would have run


# --- CK-h ---


@pytest.mark.parametrize("compiled", [True, False])
def test_ck_h_names_are_the_bare_models(tmp_path: Path, compiled: bool) -> None:
    """Saved by a compiled model or not, loaded by the other."""
    options = [ModelOptions(compile=Compile(backend="eager")), ModelOptions()]
    r1.train(tmp_path / "first", epochs=1, model_options=options[compiled])
    state = store.load(newest(tmp_path / "first"), MODEL)
    task = started(tmp_path / "first", model=r1.network(5), model_options=options[not compiled])
    assert list(equal.differ("model", state, task.bare_model.state_dict())) == []


def started(weights: Path | str | Weights, stop: str = "on_start", **options: Any) -> Any:
    """A task of R1 that began with these weights and was stopped before its first update."""
    given = weights if isinstance(weights, Weights) else Weights(str(weights))
    task = r1.make_task(None, weights=given, **options)
    Trainer(task, {"at": At(stop, 0, "stop")}).train()
    assert task.progress.updates == 0
    return task


# --- the start of a run ---


@pytest.fixture(scope="module")
def pretrained() -> Path:
    """A finished run with averages, and with a best checkpoint that is not its newest."""
    folder = process.scratch() / "pretrained"
    if not folder.exists():
        options: dict[str, Any] = {
            "save": {"keep_last": 2, "keep_best": 1, "metric": "train/loss", "mode": "max"},
            "hooks": {"average": Average(decay=0.5)},
        }
        process.result(r1.train, folder, epochs=2, test=True, **options)
    return folder


def test_from_a_run_and_its_checkpoints(pretrained: Path) -> None:
    checkpoints = store.Store(pretrained / "checkpoints")
    states = {n: store.load(store.verified(checkpoints.folder / n), MODEL)
              for n in checkpoints.names()}  # fmt: skip
    last = checkpoints.names()[-1]
    hook = equal.state_of(newest(pretrained))["hooks"]["checkpoint"]
    best = hook["best"][0][3]
    assert best != last
    for weights, name in (
        (Weights(str(pretrained)), last),
        (Weights(str(pretrained), which="best"), best),
        (Weights(str(pretrained / "checkpoints"), which=best), best),
        (Weights(str(checkpoints.folder / best)), best),
        (Weights(str(checkpoints.folder / best / MODEL)), best),
    ):
        task = started(weights, model=r1.network(5))
        assert list(equal.differ("model", states[name], task.bare_model.state_dict())) == []


def test_from_a_run_whose_checkpoints_lie_elsewhere(tmp_path: Path) -> None:
    """By the URL of all of them, of one, and of a file."""
    url = f"memory://{tmp_path.name}"
    r1.train(tmp_path / "run", epochs=1, run={"checkpoints": url})
    saved = next(store.Store(url).whole())
    trained = store.load(saved, MODEL)
    for path in (url, str(saved.path), f"{saved.path}/{MODEL}"):
        task = started(path, model=r1.network(5))
        assert list(equal.differ("model", trained, task.bare_model.state_dict())) == []
    for path in (url, str(saved.path)):
        export(path, tmp_path / "m.pt", force=True)
        load_weights(model := r1.network(5), str(tmp_path / "m.pt"))
        assert list(equal.differ("model", dict(trained), dict(model.state_dict()))) == []
    with pytest.raises(ConfigError, match=r"memory://nowhere cannot be read"):
        started("memory://nowhere")
    with pytest.raises(ConfigError, match=r"storage_options: are for a URL"):
        r1.make_task(None, run={"storage_options": {"anon": True}}, weights="here.pt")
    r1.make_task(None, run={"storage_options": {"anon": True}}, weights="memory://a/b.pt")


def test_from_the_averages_of_a_run(pretrained: Path) -> None:
    averages = equal.state_of(newest(pretrained))["averages"]["average"]
    task = started(Weights(str(pretrained), averages="average"), model=r1.network(5))
    assert list(equal.differ("model", dict(averages), dict(task.bare_model.state_dict()))) == []
    with pytest.raises(ConfigError, match=r"averages: .*hook 'ema'. It has those of: average"):
        started(Weights(str(pretrained), averages="ema"))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"which": "update_1"}, r"which: 'update_1' is not newest, best or a checkpoint of"),
        ({"at": "state_dict"}, r"at: is for a file"),
    ],
)
def test_mistakes_about_a_run(pretrained: Path, weights: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        started(Weights(str(pretrained), **weights))


def test_a_damaged_checkpoint_is_no_start(pretrained: Path, tmp_path: Path) -> None:
    shutil.copytree(newest(pretrained).path, tmp_path / "update_000000020-3")
    file = tmp_path / "update_000000020-3" / MODEL
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        started(tmp_path / "update_000000020-3")


def test_averages_start_from_the_loaded_weights(pretrained: Path, tmp_path: Path) -> None:
    """With the rate at zero nothing moves: every sample of the average is what was loaded."""
    state = store.load(newest(pretrained), MODEL)
    model = r1.network(5)
    task = r1.make_task(
        tmp_path / "run", epochs=1, model=model, weights=str(pretrained),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
    )  # fmt: skip
    average = Average(decay=0.5)
    Trainer(task, r1.make_hooks(average=average)).train()
    assert list(equal.differ("average", dict(state), dict(average.state()))) == []


def test_in_double_precision_and_channels_last(pretrained: Path, caplog: Any) -> None:
    state = store.load(newest(pretrained), MODEL)
    task = started(
        pretrained, model=r1.network(5), precision=Precision("float64"),
        model_options=ModelOptions(channels_last=True),
    )  # fmt: skip
    for name, value in task.bare_model.state_dict().items():
        assert value.dtype == torch.float64 and torch.equal(value, state[name].double())
    assert f"converted ({len(state)}): float32 -> float64" in caplog.text


# --- resuming ---


def go(folder: Path, at: At | None = None, **options: Any) -> process.Ended:
    hooks = {} if at is None else {"at": at}
    return process.run(r1.train, folder, probe_of(folder), hooks=hooks, **options)


@pytest.fixture
def file(pretrained: Path, tmp_path: Path) -> Path:
    """The file that a run starts from."""
    path = tmp_path / "weights.pt"
    shutil.copy(newest(pretrained).path / MODEL, path)
    return path


def test_a_resume_does_not_need_the_file(tmp_path: Path, file: Path) -> None:
    options: dict[str, Any] = {"weights": Weights(str(file)), "save": {"every_updates": 4}}
    reference, folder = tmp_path / "reference", tmp_path / "run"
    assert go(reference, **options).code == 0
    assert go(folder, At("on_step", 6), **options).code == KILLED
    file.unlink()
    assert go(folder, At("on_step", 17), **options).code == KILLED
    ended = go(folder, **options)
    assert ended.code == 0, ended.output
    assert_eq(reference, folder)
    # And it was these weights that it began with.
    facts = equal.state_of(newest(folder))["identity"]["initial_weights"]
    assert facts["path"] == str(file)
    plain = tmp_path / "plain"
    assert go(plain, save=options["save"]).code == 0
    models = [store.load(newest(f), MODEL) for f in (plain, folder)]
    assert list(equal.differ("model", *models)) != []


def test_a_resume_knows_its_weights_by_their_bytes(tmp_path: Path, file: Path) -> None:
    folder, moved, other = tmp_path / "run", tmp_path / "moved.pt", tmp_path / "other.pt"
    options: dict[str, Any] = {"save": {"every_updates": 4}}
    assert go(folder, At("on_step", 6), weights=str(file), **options).code == KILLED
    file.rename(moved)
    torch.save({k: v + 1 for k, v in torch.load(moved, weights_only=True).items()}, other)
    for weights, said in (
        (None, f"model.weights: {str(file)!r} -> absent"),
        (str(other), "which holds other weights"),
        (str(tmp_path / "gone.pt"), "which may hold other weights"),
        (Weights(str(moved), allow=["0.*"]), "model.weights.allow: None -> ['0.*']"),
    ):
        ended = go(folder, weights=weights, **options)
        assert ended.code == 1 and "ConfigError" in ended.output
        assert said in ended.output and "belongs to a run of another configuration" in ended.output
    assert go(folder, weights=str(moved), **options).code == 0
    facts = equal.state_of(newest(folder))["identity"]["initial_weights"]
    assert facts["path"] == str(file)  # what it began with, and not what it is called now
    # A run without is no continuation of one with, and the reverse.
    plain = tmp_path / "plain"
    assert go(plain, At("on_step", 6), **options).code == KILLED
    ended = go(plain, weights=str(moved), **options)
    assert ended.code == 1 and f"model.weights: absent -> {str(moved)!r}" in ended.output


def test_a_test_of_the_run_does_not_read_it(here: Path, capsys: Any) -> None:
    words = ["config=fine", "model.weights={path: ten.pt, allow: ['head.*']}", "run.dir=out"]
    assert run_here(words) == DONE
    (here / "ten.pt").unlink()
    capsys.readouterr()
    assert run_here([*words, "only=test", "weights=newest"]) == DONE
    assert "tensors of the model from" not in capsys.readouterr().out
    assert run_here(words) == DONE  # finished: the same command says so, without the file, too
