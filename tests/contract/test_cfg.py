"""CFG: a wrong configuration is found before any data is read, and the message names the key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.schema import check
from phaseloop.tools.run import WRONG_CONFIG
from phaseloop.tools.run import run as run_here
from tests.rigs import cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the experiment ``tiny``, as the current one."""
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the program says of a configuration that it refuses, having read no data."""
    marker = Path("data_was_opened")
    opened = [f"data.{kind}.dataset.marker={marker}" for kind in ("train", "test")]
    assert run_here(["config=tiny", *words, *opened]) == WRONG_CONFIG
    assert not marker.exists(), "the data set was opened before the mistake was found"
    assert not Path("runs").exists(), "a run folder was made before the mistake was found"
    return capsys.readouterr().err


# What is given; the full path that the message must hold; the nearest right name.
MISTAKES = [
    ("optimzier.lr=1", "optimzier", "'optimizer'"),  # a swapped letter, at the root
    ("phases.ephocs=3", "phases.ephocs", "'epochs'"),  # and further down
    ("batch_size=4", "batch_size", "'data.train.batch_size'"),  # a key levels up
    ("lr=0.1", "lr", "'optimizer.lr'"),
    ("dir=x", "dir", "'run.dir'"),
    ("data.train.batch-size=4", "data.train.batch-size", "'batch_size'"),  # a hyphen
    ("hooks.checkpoint.keep_lats=3", "hooks.checkpoint.keep_lats", "'keep_last'"),
    ("hooks.checkpont.keep_last=3", "hooks.checkpont", "'checkpoint'"),
    ("schedule={name: cosine, ned: 0.1}", "schedule.ned", "'end'"),
    ("schedule={name: cosine, warmup: {update: 3}}", "schedule.warmup.update", "'updates'"),
    ("schedule={name: cosin}", "schedule.name", "'cosine'"),
    ("data.train.worker=2", "data.train.worker", "'workers'"),
    ("data.train.dataset.sample=3", "data.train.dataset.sample", "'samples'"),
    ("optimizer.momentun=0.9", "optimizer.momentun", "'momentum'"),
    ("model.widht=9", "model.widht", "'width'"),
    ("meters.test.acuracy={}", "meters.test.acuracy", "'accuracy'"),
    ("meters.test.accuracy.topk=5", "meters.test.accuracy.topk", "'top_k'"),
    ("criterion.name=crossentropy", "criterion.name", "'cross_entropy'"),
    ("backend.devise=cpu", "backend.devise", "'device'"),
    ("train_step.name=standart", "train_step.name", "'standard'"),
    ("gradients.clip_nrom=1", "gradients.clip_nrom", "'clip_norm'"),
]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(("override", "path", "right"), MISTAKES[:10])
def test_cfg_a_override(here, capsys, prefix, override, path, right):
    text = message([prefix + override], capsys)
    assert f"{path}:" in text and right in text, text


@pytest.mark.parametrize(("override", "path", "right"), MISTAKES[10:])
def test_cfg_a_components(here, capsys, override, path, right):
    text = message([override], capsys)
    assert f"{path}:" in text and right in text, text


@pytest.mark.parametrize(("override", "path", "right"), MISTAKES[::4])
def test_cfg_a_in_a_file(here, capsys, override, path, right):
    keys, value = override.split("=", 1)
    content = yaml.safe_load(value)
    for key in reversed(keys.split(".")):
        content = {key: content}
    text = "# @package _global_\ndefaults: [tiny, _self_]\n" + yaml.safe_dump(content)
    Path("configs/config/wrong.yaml").write_text(text)
    said = message(["config=wrong"], capsys)
    assert f"{path}:" in said and right in said, said


def test_cfg_a_groups_and_experiments(here, capsys):
    assert run_here(["config=tyni"]) == WRONG_CONFIG
    assert "Did you mean 'tiny'?" in capsys.readouterr().err
    assert run_here(["config=tiny", "optimizer=sdg"]) == WRONG_CONFIG
    assert "Did you mean 'sgd'?" in capsys.readouterr().err


def test_cfg_a_true_command_line(tmp_path):
    done = cli.run(["config=tiny", "optimzer.lr=1"], cli.folder(tmp_path))
    assert done.returncode == 2
    assert "optimzer: there is no such key. Did you mean 'optimizer'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_cfg_a_missing_values_and_wrong_types(here, capsys):
    assert "phases.epochs: 'many' is not int or float or null" in message(
        ["phases.epochs=many"], capsys
    )
    assert "seed: 1.5 is not int" in message(["seed=1.5"], capsys)
    assert "data.train.batch_size" in message(["data.train.batch_size=null"], capsys)
    assert "phases.epochs: give a length" in message(["phases.epochs=null"], capsys)
    assert "model" in message(["~model.name"], capsys)


def test_cfg_b_the_class_and_the_option_are_named(here, capsys):
    text = message(["optimizer=sgd", "optimizer.betas=[0.9,0.99]"], capsys)
    assert "optimizer.betas" in text and "SGD" in text
    text = message(["optimizer=adam", "optimizer.momentum=0.9"], capsys)
    assert "optimizer.momentum" in text and "Adam" in text


@pytest.mark.parametrize("number", ["1e-3", "1e-03", "1.e-3", ".001"])
def test_cfg_c_spellings_of_a_float(here, number):
    Path("configs/config/number.yaml").write_text(
        f"# @package _global_\ndefaults: [tiny, _self_]\noptimizer: {{lr: {number}}}\n"
    )
    for words in (["config=number"], ["config=tiny", f"optimizer.lr={number}"]):
        rate = compose(words).config["optimizer"]["lr"]
        assert type(rate) is float and rate == 0.001


def test_cfg_c_a_quoted_number_is_an_error(here, capsys):
    text = message(["optimizer.lr='1e-3'"], capsys)
    assert "optimizer.lr" in text and "'1e-3'" in text and "float" in text
    text = message(["gradients.clip_norm='1e-3'"], capsys)
    assert "gradients.clip_norm" in text and "float" in text


REPLACED = "# @package _global_\ndefaults: [tiny, _self_]\noptimizer: {name: adamw, lr: 0.01}\n"


def test_cfg_c_a_replaced_component_inherits_nothing(here):
    # tiny has SGD with momentum .9 from its group.
    assert compose(["config=tiny"]).config["optimizer"]["momentum"] == 0.9
    Path("configs/config/replaced.yaml").write_text(REPLACED)
    assert compose(["config=replaced"]).config["optimizer"] == {"name": "adamw", "lr": 0.01}
    by_hand = compose(["config=tiny", "optimizer.name=adamw", "optimizer.lr=0.01"])
    assert by_hand.config["optimizer"] == {"name": "adamw", "lr": 0.01}
    by_target = compose(["config=tiny", "optimizer._target_=torch.optim.AdamW"])
    assert by_target.config["optimizer"] == {"_target_": "torch.optim.AdamW"}
    nested = compose(["config=tiny", "data.train.dataset={name: other, path: x}"])
    assert nested.config["data"]["train"]["dataset"] == {"name": "other", "path": "x"}


def test_cfg_d_default_below_experiment_below_command_line(here):
    # Every pair of layers, on one key: main.yaml's log_every is 10.
    experiment = "# @package _global_\ndefaults: [tiny, _self_]\nrun: {log_every: 7}\n"
    Path("configs/config/logs.yaml").write_text(experiment)

    def log_every(*words: str) -> int:
        return compose(words).config["run"]["log_every"]

    assert log_every("config=tiny") == 10
    assert log_every("config=logs") == 7
    assert log_every("config=tiny", "run.log_every=3") == 3
    assert log_every("config=logs", "run.log_every=3") == 3
    assert log_every("run.log_every=3", "config=logs") == 3
    # A group's file (sgd: lr .1) lies between the two.
    rate = "# @package _global_\ndefaults: [tiny, _self_]\noptimizer: {lr: 0.3}\n"
    Path("configs/config/rate.yaml").write_text(rate)
    assert compose(["config=tiny"]).config["optimizer"]["lr"] == 0.1
    assert compose(["config=rate"]).config["optimizer"]["lr"] == 0.3
    assert compose(["config=rate", "optimizer.lr=0.5"]).config["optimizer"]["lr"] == 0.5


def test_cfg_d_resolved_yaml_is_what_was_used(here):
    words = ["config=tiny", "phases.epochs=1", "optimizer.lr=0.05", "seed=3"]
    assert run_here(words) == 0
    resolved = yaml.safe_load(Path("runs/tiny/resolved.yaml").read_text())
    assert resolved["optimizer"]["lr"] == 0.05 and resolved["seed"] == 3
    # Given back as a configuration, it stands for itself: nothing was left to a default.
    assert resolved == dataclasses.asdict(check(resolved))


def test_cfg_f_hooks_are_a_mapping_and_lists_are_replaced(here):
    hooks = compose(["config=tiny"]).config["hooks"]
    more = compose(["config=tiny", "hooks.model_summary.depth=1"]).config["hooks"]
    assert more == {**hooks, "model_summary": {"depth": 1}}
    fewer = compose(["config=tiny", "hooks.console=null"]).config["hooks"]
    assert fewer == {**hooks, "console": None}
    assert compose(["config=tiny", "imports=[a,b]"]).config["imports"] == ["a", "b"]


def test_cfg_f_null_switches_a_hook_off(here):
    assert run_here(["config=tiny", "phases.epochs=1", "hooks.metrics_file=null"]) == 0
    assert not Path("runs/tiny/metrics.jsonl").exists()
    assert Path("runs/tiny/checkpoints").is_dir()


@pytest.mark.parametrize("pattern", ["runs/${now:%Y-%m-%d}", "runs/${now:%H-%M}"])
def test_cfg_g_a_time_in_the_folder_is_warned_of(here, capsys, pattern):
    assert run_here(["config=tiny", "phases.epochs=1", f"run.dir={pattern}"]) == 0
    said = capsys.readouterr().err
    assert "run.dir" in said and "will not find" in said
    assert run_here(["config=tiny", "phases.epochs=1"]) == 0
    assert "will not find" not in capsys.readouterr().err
