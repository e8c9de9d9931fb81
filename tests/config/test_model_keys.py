"""The engine's own keys of ``model``: taken out of the component, checked, and never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phaseloop.tools.jobs  # noqa: F401 registers steps and hooks
from phaseloop import Compile, ConfigError, ModelOptions, Weights, register_model
from phaseloop.engine import registry
from phaseloop.engine.config.build import build
from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.schema import check
from phaseloop.tools.run import DONE, WRONG_CONFIG
from phaseloop.tools.run import run as run_here
from tests.rigs import cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(*words: str) -> ModelOptions:
    return build(check(compose(["config=tiny", *words]).config)).task.model_options


def test_without_them_everything_is_off(here):
    assert made() == ModelOptions()


def test_from_yaml_to_the_task(here):
    words = ["model.compile=true", "model.channels_last=true", "model.checkpoint=['0']"]
    assert made(*words) == ModelOptions(compile=True, channels_last=True, checkpoint=["0"])
    assert made("model.compile={backend: eager, dynamic: false}") == ModelOptions(
        compile=Compile(backend="eager", dynamic=False)
    )
    assert made("model.compile=false").compiler is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "model.compil=true",
            "model.compil: TinyModel takes no option 'compil'. Did you mean 'com",
        ),
        (
            "model.compile.backnd=eager",
            "model.compile.backnd: there is no such key. Did you mean 'b",
        ),
        ("model.compile.backend=eagr", "model.compile.backend: 'eagr' is no backend. Did you mean"),
        (
            "model.compile=fast",
            "model.compile: 'fast' is not bool or a mapping of backend, dynamic",
        ),
        ("model.compile={mode: fast}", "model.compile.mode: 'fast' is not one of default"),
        ("model.channels_last=2", "model.channels_last: 2 is not bool"),
        ("model.checkpoint=features", "model.checkpoint: 'features' is not a list"),
        ("model.checkpoint=[1]", "model.checkpoint.0: 1 is not str"),
        ("model.weights=3", "model.weights: 3 is not str or a mapping of add_prefix, allow"),
        ("model.weights={pth: a.pt}", "model.weights.pth: there is no such key. Did you mean 'pat"),
        ("model.weights={at: model}", "model.weights.path: a value is needed"),
        ("model.weights={path: a.pt, allow: head}", "model.weights.allow: 'head' is not a list"),
        ("model.weights={path: a.pt, include: []}", "model.weights.include: nothing would be load"),
        ("model.weights='zip::s3://a/b'", "model.weights.path: 'zip::s3://a/b' chains protocols"),
    ],
)
def test_mistakes_are_found_before_data_is_read(here, capsys, word, said):
    opened = "data.train.dataset.marker=data_was_opened"
    assert run_here(["config=tiny", word, opened]) == WRONG_CONFIG
    assert said in capsys.readouterr().err
    assert not Path("data_was_opened").exists()


def test_a_pattern_without_a_module(here, capsys):
    assert run_here(["config=tiny", "model.checkpoint=['4']"]) == WRONG_CONFIG
    assert "matches no module with a forward. There are: 0, 1, 2, 3" in capsys.readouterr().err


def test_a_model_with_an_option_of_the_same_name(here, monkeypatch):
    """Which of the two is meant is not guessed."""
    monkeypatch.setattr(registry.models, "_entries", dict(registry.models._entries))

    @register_model("own_checkpoint")
    def model(checkpoint: bool = False, **others: Any) -> nn.Module:
        return nn.Linear(4, 2)

    named = "model={name: own_checkpoint"
    assert made(f"{named}}}") == ModelOptions()  # it is not given, so nothing has to be guessed
    with pytest.raises(ConfigError, match=r"model\.checkpoint: the engine takes this key, and "):
        made(f"{named}, checkpoint: true}}")
    # What takes any option does not get the engine's.
    assert made(f"{named}, compile: {{backend: eager}}}}").compiler == Compile("eager")


def test_weights_from_yaml_to_the_task(here):
    task = build(check(compose(["config=tiny", "model.weights=a/b.pt"]).config)).task
    assert task.weights == Weights("a/b.pt")
    words = "model.weights={path: a.pt, at: model, allow: ['0.*'], rename: {fc: '3'}}"
    task = build(check(compose(["config=tiny", words]).config)).task
    assert task.weights == Weights("a.pt", at="model", allow=["0.*"], rename={"fc": "3"})
    task = build(check(compose(["config=tiny", "model.weights=null"]).config)).task
    assert task.weights is None


def test_plan_says_what_is_on(here, capsys):
    words = ["model.channels_last=true", "model.checkpoint=['0', '3']", "plan=true"]
    words.append("model.weights=a.pt")
    assert run_here(["config=tiny", *words]) == DONE
    out = capsys.readouterr().out
    assert "model       channels last, activation checkpointing of 0, 3" in out
    assert "weights     at the start from a.pt" in out
    assert torch.is_grad_enabled()
