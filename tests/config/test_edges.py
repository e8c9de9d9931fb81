"""Edges of a configuration: what is refused before any data is read, and what a word may mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop.engine.config.build import Built, build
from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.schema import check
from phaseloop.engine.trainer import Trainer
from phaseloop.tools.run import DONE, WRONG_CONFIG
from phaseloop.tools.run import run as run_here
from tests.rigs import cli

HERE = "tests.config.test_edges"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the experiment ``tiny``, as the current one."""
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str, reads_data: bool = False) -> str:
    """What the program says of a configuration that it refuses."""
    opened = [f"data.{kind}.dataset.marker=opened" for kind in ("train", "test")]
    assert run_here(["config=tiny", *words, *opened]) == WRONG_CONFIG
    if not reads_data:
        assert not Path("opened").exists(), "a data set was opened before the mistake was found"
        assert not Path("runs").exists(), "a run folder was made before the mistake was found"
    return capsys.readouterr().err


def built(*words: str) -> Built:
    return build(check(compose(["config=tiny", *words]).config))


# --- words ---


@pytest.mark.parametrize("turn", [1, -1])
def test_the_words_of_a_command_line_have_no_order(here: Path, turn: int) -> None:
    words = ["optimizer.lr=0.3", "optimizer.name=adamw"][::turn]
    optimizer = compose(["config=tiny", *words]).config["optimizer"]
    assert optimizer == {"name": "adamw", "lr": 0.3}


# --- refused ---

PARTS = "lengths: [0.5, 0.5], parts: [{name: constant}, %s]"


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("precision=fp16", "precision"),
        ("data.train.batch_size=0", "data.train.batch_size"),
        ("data.test.batch_size=-1", "data.test.batch_size"),
        ("data.test.shuffle=true", "data.test.shuffle"),
        ("data.test.drop_last=true", "data.test.drop_last"),
        ("data.train.pin_memory=true", "data.train.pin_memory"),
        ("weights=newest", "weights"),
        ("schedule={name: composite, %s}" % (PARTS % "{name: cosin}"), "schedule.parts.1"),
        ("schedule={name: composite, %s}" % (PARTS % "{name: cosine, ned: 1}"), "schedule.parts.1"),
    ],
)
def test_a_mistake_is_found_before_data_is_opened(
    here: Path, capsys: pytest.CaptureFixture[str], word: str, key: str
) -> None:
    said = refused(capsys, word)
    assert said.startswith(f"wrong configuration: {key}"), said


def test_what_torch_refuses_is_a_wrong_configuration(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "optimizer.lr=-1", reads_data=True)
    assert said.startswith("wrong configuration: optimizer:") and "-1" in said


@pytest.mark.parametrize("metric", ["test/acuracy", "tset/accuracy"])
def test_a_refused_hook_leaves_what_a_finished_run_says(
    here: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    assert run_here(["config=tiny"]) == DONE
    files = [Path("runs/tiny") / name for name in ("status.json", "resolved.yaml")]
    before = [file.read_text() for file in files]
    words = [f"hooks.early_stop.metric={metric}", "hooks.early_stop.patience=3"]
    assert run_here(["config=tiny", *words]) == WRONG_CONFIG
    assert "hooks.early_stop.metric" in capsys.readouterr().err
    assert [file.read_text() for file in files] == before
    assert json.loads(before[0])["status"] == "finished"


# --- components ---

factors: list[float] = []
"""What :func:`scaled` was called with."""


def scaled(samples: list[Any], factor: float) -> Any:
    """A collate function with an option."""
    factors.append(factor)
    x, y = default_collate(samples)
    return factor * x, y


def collate(options: str) -> str:
    return f"data.train.collate={{_target_: {HERE}.scaled{options}}}"


def test_a_collate_function_gets_its_options(here: Path) -> None:
    factors.clear()
    words = [collate(", factor: 2.5"), "phases.epochs=1", f"imports=[tests.rigs.tiny,{HERE}]"]
    made = built(*words)
    Trainer(made.task, {}).train()
    windows = 40 // 4  # tiny's samples in its batches
    assert factors == [2.5] * windows


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("", "data.train.collate.factor"),
        (", factor: two", "data.train.collate.factor"),
        (", factor: 2.0, facto: 1", "data.train.collate.facto"),
    ],
)
def test_the_options_of_a_collate_function_are_checked(
    here: Path, capsys: pytest.CaptureFixture[str], options: str, key: str
) -> None:
    said = refused(capsys, collate(options))
    assert said.startswith(f"wrong configuration: {key}:"), said


class Learned(nn.Module):
    """Cross entropy with a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.temperature, target)


def test_the_parameters_of_a_criterion_are_trained(here: Path) -> None:
    task = built(f"criterion={{_target_: {HERE}.Learned}}", "phases.epochs=1").task
    Trainer(task, {}).train()
    criterion = task.criterion_module
    assert isinstance(criterion, Learned)
    assert float(criterion.temperature.detach()) != 1.0
