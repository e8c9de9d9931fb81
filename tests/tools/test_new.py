"""A project of one's own: made, trained and tested as a user does, in folders of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phaseloop.tools import new
from phaseloop.tools.run import DONE, WRONG_CONFIG
from tests.rigs import cli, process

NAME = "shapes"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command, in a process and a folder of its own."""
    here = tmp_path_factory.mktemp("here")
    tool = cli.ROOT / "tools" / "new.py"
    ended = process.start(cli.go_on_as, tool, [NAME], here, cli.environment()).wait()
    assert ended.code == DONE, ended.output
    assert f"cd {NAME} && phaseloop config={NAME}" in ended.output
    assert [path.name for path in here.iterdir()] == [NAME]
    return here / NAME


def train(project: Path, *words: str) -> dict[str, float]:
    """Train one epoch; the final metrics."""
    run_dir = project / "runs" / str(len(list(project.glob("runs/*"))))
    command = [f"config={NAME}", "phases.epochs=1", f"run.dir={run_dir}", *words]
    ended = process.start(cli.go_on_as, cli.RUN, command, project, cli.environment()).wait()
    assert ended.code == DONE, ended.output
    found: dict[str, float] = json.loads((run_dir / "status.json").read_text())["final"]
    return found


def test_the_files_are_those_that_its_readme_names(project: Path) -> None:
    files = {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()}
    made = {file for file in files if not file.startswith("runs/") and "__pycache__" not in file}
    readme = (project / "README.md").read_text()
    named = set(re.findall(r"^\| `(\S+)` \|", readme, re.MULTILINE))
    assert made == named | {"README.md", "pyproject.toml", ".gitignore"}
    for file in made:
        text = (project / file).read_text()
        assert "PROJECT" not in text and "template" not in text
        assert len(text.splitlines()) <= 70


def test_it_trains_with_its_own_step_and_hook(project: Path) -> None:
    """The step's penalty and the hook's trend are logged, and a tenth of the errors is left."""
    assert train(project)["test/accuracy"] > 0.5  # of ten classes, after one epoch
    rows = (project / "runs" / "0" / "metrics.jsonl").read_text()
    assert '"penalty"' in rows and '"loss_trend"' in rows


def test_the_model_in_its_readme_works(project: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    (project / NAME / "model.py").write_text(re.sub(r"^   ", "", block, flags=re.MULTILINE))
    init = project / NAME / "__init__.py"
    before = init.read_text()
    init.write_text(before.replace("import hook, step", "import hook, model, step"))
    try:
        assert train(project, "model={name: my_model, width: 64}")["test/accuracy"] > 0.5
    finally:
        init.write_text(before)
        (project / NAME / "model.py").unlink()


def test_its_style_is_clean(project: Path) -> None:
    """By the usual rules of ruff, away from ours."""
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "E,F,I,UP,B,SIM,RUF,N", "--target-version", "py310"]
    for command in (["check", *rules], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *command, "--isolated", "--line-length", "100", "--no-cache", "."],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_its_own_tests_pass_from_another_folder(project: Path, tmp_path: Path) -> None:
    """Three true runs of the command line, one of them killed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", project],
        cwd=tmp_path,
        env=cli.environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert list(tmp_path.iterdir()) == []


# --- names that cannot be ---

WRONG = {
    "my-project": "cannot be the name of a Python package",
    "2shapes": "cannot be the name",
    "shapes_": "cannot be the name",
    "_shapes": "cannot be the name",
    "größe": "cannot be the name",
    "a/b": "cannot be the name",
    "..": "cannot be the name",
    "": "cannot be the name",
    "class": "is a word of Python's",
    "None": "is a word of Python's",
    "yes": "is a word of Python's or of YAML's",
    "null": "is a word of Python's or of YAML's",
    "nan": "is a word of Python's or of YAML's or Hydra's",
    "Inf": "is a word of Python's or of YAML's or Hydra's",
    "tests": "is the name of something in every project",
    "PROJECT": "is the name of something in every project",
    "digits": "config=digits exists already",
    "json": "there is a module 'json' already",
    "torch": "there is a module 'torch' already",
    "phaseloop": "there is a module 'phaseloop' already",
}


@pytest.mark.parametrize(("name", "said"), WRONG.items(), ids=[repr(name) for name in WRONG])
def test_a_name_that_cannot_be_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new.run([name]) == WRONG_CONFIG
    text = capsys.readouterr().err
    assert text.startswith("wrong configuration: NAME: ") and said in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["a", "b"], ["--force"]])
def test_one_name_is_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new.run(words) == WRONG_CONFIG
    assert "give one name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_nothing_is_overwritten(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = Path(NAME)
    if kind == "folder":
        taken.mkdir()
    elif kind == "file":
        taken.write_text("mine")
    else:
        taken.symlink_to("nowhere")
    assert new.run([NAME]) == WRONG_CONFIG
    assert f"NAME: {NAME} exists, and nothing is overwritten" in capsys.readouterr().err
    assert os.listdir() == [NAME]
    assert not taken.is_dir() or os.listdir(taken) == []
    assert not taken.is_file() or taken.read_text() == "mine"


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: object, **options: object) -> int:
        raise OSError("no space left")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "write_text", full)
    assert new.run([NAME]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_package_beside_this_tool_is_no_installed_one(tmp_path: Path) -> None:
    """``python tools/new.py plan`` finds tools/plan.py first of all modules."""
    ended = process.start(cli.go_on_as, cli.ROOT / "tools" / "new.py", ["plan"], tmp_path).wait()
    assert ended.code == DONE, ended.output
