"""tools/seeds.py: one process a seed, a table at the end, and nothing trained twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from phaseloop.engine.errors import ConfigError
from phaseloop.tools import seeds
from tests.rigs import cli

QUIET = ["hooks.console=null"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(cli.folder(tmp_path))
    monkeypatch.setenv("PYTHONPATH", cli.environment()["PYTHONPATH"])
    return tmp_path


def finals(folder: Path, seeds: list[int]) -> list[dict[str, float]]:
    found = [json.loads((folder / f"seed_{s}/status.json").read_text()) for s in seeds]
    return [dict(one["final"]) for one in found]


def test_each_seed_is_trained_once_and_the_table_is_theirs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["config=tiny", "run.dir='many runs, (a=b)'", "phases.epochs=1", *QUIET]
    assert seeds.run([*words, "seeds=3,5"]) == 0
    first, second = finals(here / "many runs, (a=b)", [3, 5])
    assert first["test/loss"] != second["test/loss"]
    low, high = sorted([first["test/loss"], second["test/loss"]])
    printed = capsys.readouterr().out
    assert f"| test/loss | {(low + high) / 2:.4g} | {low:.4g} | {high:.4g} |" in printed
    assert "| CPU seconds |" in printed and "seed 3  " in printed
    modified = (here / "many runs, (a=b)/seed_3/status.json").stat().st_mtime_ns
    assert seeds.run([*words, "seeds=3,5"]) == 0
    assert capsys.readouterr().out == printed
    assert (here / "many runs, (a=b)/seed_3/status.json").stat().st_mtime_ns == modified


def test_runs_of_other_words_are_not_mixed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "runs/tiny-seeds"
    folder.mkdir(parents=True)
    result = {"words": "config=tiny phases.epochs=2", "cpu": 1.0, "final": {"test/loss": 1.0}}
    (folder / seeds.RESULT.format(0)).write_text(json.dumps(result))
    assert seeds.run(["config=tiny", "seeds=0"]) == 2
    assert "run.dir: runs/tiny-seeds/seed_0.json is of other words" in capsys.readouterr().err


def test_a_seed_that_fails_ends_it_with_its_code(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = here / "runs/tiny-seeds/seed_0"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the run's folder should be")
    assert seeds.run(["config=tiny", "seeds=0,1"]) != 0
    assert "seed 0 did not finish" in capsys.readouterr().out
    assert not (here / "runs/tiny-seeds/seed_1").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seeds=a"], "seeds: 'a' is not whole numbers"),
        (["seeds=1,1"], "seeds: '1,1' has one of them twice"),
        (["seed=7,8"], "seed: say which by seeds=7,8"),
        (["plan=true"], "plan: seeds are for training"),
        (["only=test"], "only: seeds are for training"),
        (["phases.epoch=1"], "phases.epoch"),
    ],
)
def test_wrong_words_are_named(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert seeds.run(["config=tiny", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_metric_that_some_seeds_lack_is_over_the_others() -> None:
    results = [{"cpu": 1.0, "final": {"a": 1.0}}, {"cpu": 3.0, "final": {"a": 2.0, "b": 5.0}}]
    assert seeds.table(results)[2:] == [
        "| a | 1.5 | 1 | 2 |",
        "| b | 5 | 5 | 5 |",
        "| CPU seconds | 2 | 1 | 3 |",
    ]


@pytest.mark.parametrize(
    "text", ["a b", "a,b", "a(b)[1]{c: d}", "it's", r"c:\d", "e\\", "f\\'", "ä=${g}"]
)
def test_any_folder_can_be_said(text: str) -> None:
    override = OverridesParser.create().parse_override(f"run.dir={seeds._quoted(text)}")
    assert override.value() == text


def test_an_error_is_ours() -> None:
    with pytest.raises(ConfigError, match="seeds"):
        seeds._numbers("")
