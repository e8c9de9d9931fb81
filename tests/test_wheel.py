"""The wheel: it holds all that a run needs, and digits trains from it where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = sorted(path for path in (ROOT / "phaseloop").iterdir() if path.is_symlink())
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")

# All tests of this file on one worker, so that the wheel is built once.
pytestmark = pytest.mark.xdist_group("wheel")


def run(*command: str | Path, cwd: Path, limit: float = 300.0) -> str:
    """Run a command away from this environment's settings; return what it printed.

    Raises AssertionError with the whole output when the command fails.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build the wheel or sdist of `source` with this environment's setuptools."""
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", out, source, cwd=source)
    (made,) = out.iterdir()
    return made


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def expected_names() -> set[str]:
    """Every file of the packages that a user needs, under the name it has in the wheel."""
    found = {"phaseloop/__init__.py", "phaseloop/py.typed"}
    for link in LINKS:
        for pattern in ("*.py", "*.yaml", "*.npz", "*.md", "*.html", "*.css", "*.template"):
            for path in link.resolve().rglob(pattern):
                found.add("phaseloop/" + path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, since a build leaves folders behind in the one it builds."""
    copy = tmp_path_factory.mktemp("tree")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    for folder in [ROOT / "phaseloop", *(link.resolve() for link in LINKS)]:
        shutil.copytree(folder, copy / folder.name, symlinks=True, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_links_are_relative_and_lead_to_the_package_folders() -> None:
    assert {link.name: os.readlink(link) for link in LINKS} == {
        name: f"../{name}"
        for name in ("configs", "engine", "hooks", "recipes", "tools", "train_steps")
    }


def test_every_folder_with_code_is_a_package() -> None:
    """The import rules in pyproject.toml do not see a folder that has no __init__.py."""
    folders = {path.parent for link in LINKS for path in link.resolve().rglob("*.py")}
    assert sorted(f for f in folders if not (f / "__init__.py").is_file()) == []


def test_wheel_holds_code_configs_types_and_recipe_data(wheel: Path) -> None:
    held = names(wheel)
    assert expected_names() - held == set()
    assert "phaseloop/configs/config/digits.yaml" in held
    assert any(name.startswith("phaseloop/recipes/digits/") and ".npz" in name for name in held)
    outside = {name for name in held if not name.startswith(("phaseloop/", "phaseloop-"))}
    assert outside == set()
    assert not any("__pycache__" in name for name in held)


def test_sdist_makes_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path / "sdist")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    assert names(again) == names(wheel)


def test_digits_trains_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)

    # The dependencies come from the environment that runs this test. Folders named in a .pth file
    # stand behind the new site-packages, and .pth files in them are not read, so neither an
    # editable install nor another copy of phaseloop there can be what is found.
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
    packages = Path(purelib.strip())
    borrowed = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(borrowed) + "\n")
    find = "import importlib.util; print(importlib.util.find_spec('phaseloop').origin)"
    found = run(python, "-c", find, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(packages), found

    work = tmp_path / "work"
    work.mkdir()
    run(home / "bin" / "phaseloop", "config=digits", "phases.epochs=1", cwd=work)
    status = json.loads((work / "runs" / "digits" / "status.json").read_text())
    assert status["status"] == "finished"

    # A project of one's own, made from what is in the wheel, trains likewise.
    run(python, "-m", "phaseloop.tools.new", "mine", cwd=work)
    run(home / "bin" / "phaseloop", "config=mine", "phases.epochs=1", cwd=work / "mine")
    status = json.loads((work / "mine" / "runs" / "mine" / "status.json").read_text())
    assert status["status"] == "finished"
