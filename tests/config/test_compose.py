"""Composing: the merge rule, one spelling of overrides, and which folder is searched first."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloop.engine.config.compose import compose, experiments, merge, normalize
from phaseloop.engine.config.schema import check
from phaseloop.engine.errors import ConfigError
from tests.rigs import cli


@pytest.mark.parametrize(
    ("lower", "higher", "merged"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"l": [1, 2]}, {"l": [3]}, {"l": [3]}),
        ({"m": {"a": 1}}, {"m": {"b": 2}}, {"m": {"a": 1, "b": 2}}),
        ({"m": {"a": 1}}, {"m": None}, {"m": None}),
        ({"m": None}, {"m": {"a": 1}}, {"m": {"a": 1}}),
        # the same component keeps its options, another one starts empty
        ({"name": "x", "a": 1}, {"name": "x", "b": 2}, {"name": "x", "a": 1, "b": 2}),
        ({"name": "x", "a": 1}, {"name": "y", "b": 2}, {"name": "y", "b": 2}),
        ({"name": "x", "a": 1}, {"_target_": "t"}, {"_target_": "t"}),
        ({"_target_": "t", "a": 1}, {"name": "x"}, {"name": "x"}),
        ({"_target_": "t", "a": 1}, {"_target_": "t", "b": 2}, {"_target_": "t", "a": 1, "b": 2}),
        # naming what had no name yet changes nothing
        ({"a": 1}, {"name": "x"}, {"a": 1, "name": "x"}),
    ],
)
def test_merge(lower, higher, merged):
    before = repr(lower), repr(higher)
    assert merge(lower, higher) == merged
    assert (repr(lower), repr(higher)) == before, "merging changed its arguments"


def test_overrides_have_one_meaning_however_they_are_spelled():
    for prefix in ("", "+", "++"):
        assert normalize([f"{prefix}a.b=1"], ["optimizer"]) == ["++a.b=1"]
        assert normalize([f"{prefix}optimizer=sgd"], ["optimizer"]) == ["optimizer=sgd"]
    assert normalize(["optimizer.lr=1"], ["optimizer"]) == ["++optimizer.lr=1"]
    assert normalize(["~hooks.console"], []) == ["~hooks.console"]
    assert normalize(["hydra.verbose=true"], []) == ["hydra.verbose=true"]


def test_the_current_folder_is_searched_first(tmp_path, monkeypatch):
    mine = "# @package _global_\nseed: 77\n"
    cli.folder(tmp_path, digits=mine)
    monkeypatch.chdir(tmp_path)
    assert compose(["config=digits"]).config["seed"] == 77
    assert "tiny" in experiments() and "digits" in experiments()
    (tmp_path / "configs" / "optimizer").mkdir()
    (tmp_path / "configs" / "optimizer" / "mine.yaml").write_text("name: sgd\nlr: 0.7\n")
    assert compose(["config=tiny", "optimizer=mine"]).config["optimizer"]["lr"] == 0.7
    assert compose(["config=tiny", "optimizer=adam"]).config["optimizer"]["name"] == "adam"


@pytest.mark.parametrize("word", ["+x=1", "+x={x: 1}", "+x={y: 1}", "+data.x=1", "+data.x={x: 1}"])
def test_a_wrong_key_is_not_what_was_meant(tmp_path, monkeypatch, word):
    monkeypatch.chdir(cli.folder(tmp_path))
    with pytest.raises(ConfigError, match="there is no such key") as caught:
        check(compose(["config=tiny", word]).config)
    hint = str(caught.value).partition("Did you mean ")[2]
    assert not hint.startswith(("'x", "'data.x")), str(caught.value)


def test_interpolations_are_resolved_and_values_can_be_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(cli.folder(tmp_path))
    config = compose(["config=tiny", "model.width=${seed}", "seed=5"]).config
    assert config["model"]["width"] == 5
    assert "momentum" not in compose(["config=tiny", "~optimizer.momentum"]).config["optimizer"]
    with pytest.raises(ConfigError, match=r"optimizer\.momentun: .*Did you mean 'momentum'"):
        compose(["config=tiny", "~optimizer.momentun"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "config: choose one"),
        (["config=tiny", "nonsense"], "nonsense"),
        (["config=tiny", "optimizer.lr=[1"], "optimizer.lr"),
        (["config=tiny", "optimizer.lr=1,2"], "--multirun"),
        (["config=tiny", "model.width=${nowhere}"], "nowhere"),
    ],
)
def test_what_hydra_refuses_is_said_in_our_words(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(cli.folder(tmp_path))
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert said in str(caught.value)


def test_a_file_chosen_higher_takes_the_place_of_what_was_there(tmp_path, monkeypatch):
    tuned = "# @package _global_\ndefaults: [tiny, _self_]\noptimizer: {nesterov: true, lr: 0.3}\n"
    other = (
        "# @package _global_\ndefaults: [tuned, override /optimizer: adam, _self_]\n"
        "optimizer: {eps: 0.5}\n"
    )
    monkeypatch.chdir(cli.folder(tmp_path, tuned=tuned, other=other))

    def optimizer(*words: str) -> dict:
        return compose(words).config["optimizer"]

    adam, sgd = {"name": "adam", "lr": 0.001}, {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    sgd["weight_decay"] = 0.0
    assert optimizer("config=tuned") == {**sgd, "nesterov": True, "lr": 0.3}
    assert optimizer("config=tuned", "optimizer=sgd") == {**sgd, "nesterov": True, "lr": 0.3}
    assert optimizer("config=tuned", "optimizer=adam") == adam
    assert optimizer("config=other") == {**adam, "eps": 0.5}
    assert optimizer("config=other", "optimizer=sgd", "optimizer.lr=3.0") == {**sgd, "lr": 3.0}
    for word in ("optimizer=null", "~optimizer"):
        assert optimizer("config=tuned", word) is None


@pytest.mark.parametrize("overridden", ["", "  - override /optimizer: adam\n"])
def test_an_experiment_without_its_first_line_is_named(tmp_path, monkeypatch, overridden):
    text = f"defaults:\n  - tiny\n{overridden}  - _self_\nseed: 3\n"
    monkeypatch.chdir(cli.folder(tmp_path, headless=text))
    with pytest.raises(ConfigError, match=r"configs/config/headless.yaml: .*@package _global_"):
        compose(["config=headless"])


@pytest.mark.parametrize("word", ["seed=1,2", "optimizer=sgd,adam", "seed=range(3)"])
def test_several_values_without_multirun_are_refused(tmp_path, monkeypatch, word):
    monkeypatch.chdir(cli.folder(tmp_path))
    with pytest.raises(ConfigError, match=f"{word.split('=')[0]}: .*--multirun"):
        compose(["config=tiny", word])


def test_a_misspelt_hook_is_not_switched_off_in_silence(tmp_path, monkeypatch):
    text = "# @package _global_\ndefaults: [tiny, _self_]\nhooks: {checkpiont: null}\n"
    monkeypatch.chdir(cli.folder(tmp_path, quiet=text))
    for words in (["config=tiny", "hooks.checkpiont=null"], ["config=quiet"]):
        with pytest.raises(ConfigError, match=r"hooks.checkpiont: .*Did you mean 'checkpoint'"):
            compose(words)
    # One that is known and not on may be switched off: a sweep over it and null needs that.
    assert compose(["config=tiny", "hooks.early_stop=null"]).config["hooks"]["early_stop"] is None


def test_a_broken_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(cli.folder(tmp_path, broken="a: [1\nb: 2\n"))
    with pytest.raises(ConfigError) as caught:
        compose(["config=broken"])
    assert "broken.yaml" in str(caught.value)


def test_checking_keys_does_not_import_torch(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from phaseloop.engine.config.compose import compose\n"
        "from phaseloop.engine.config.schema import check\n"
        "check(compose(['config=tiny']).config)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    folder = cli.folder(tmp_path)
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=cli.environment(), check=True)
    assert Path(folder / "configs").is_dir()
