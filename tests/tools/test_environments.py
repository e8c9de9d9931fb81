"""tools/environments/make.sh: what is built once is shared, and never taken away from its users."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$1" in
-c) echo 3.11 ;;
-m) for last; do :; done
    mkdir -p "$last/bin" "$last/lib/python3.11/site-packages"
    printf '#!/bin/sh\\ncase "$*" in *build-iso*) exit ${BROKEN:-0} ;; esac\\n' >"$last/bin/pip"
    cp "$last/bin/pip" "$last/bin/python"
    chmod +x "$last/bin/pip" "$last/bin/python" ;;
esac
"""
"""One whose environments have a pip that installs nothing."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout, and programs beside it that only seem to be there."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("python3", PYTHON), ("g++", "#!/bin/sh\n"), ("cmake", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    folder = tmp_path / "checkout"
    (folder / "phaseloop").mkdir(parents=True)
    shutil.copytree(ROOT / "tools" / "environments", folder / "tools" / "environments")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def make(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    place = checkout.parent
    return subprocess.run(
        [checkout / "tools" / "environments" / "make.sh", "horovod"],
        env={
            **os.environ,
            "PATH": f"{place / 'programs'}{os.pathsep}{os.environ['PATH']}",
            "PHASELOOP_CACHE": str(place / "cache"),
            "TMPDIR": str(place),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def built(checkout: Path) -> set[Path]:
    return {path for path in (checkout.parent / "cache").iterdir() if path.is_dir()}


def test_what_is_built_is_shared_and_stays_as_long_as_somebody_may_run_in_it(
    checkout: Path,
) -> None:
    first = make(checkout)
    assert first.returncode == 0 and "building" in first.stdout, first.stderr
    (shared,) = built(checkout)
    thin = (checkout / ".venv-horovod").stat().st_ino
    again = make(checkout)
    assert again.returncode == 0 and "building" not in again.stdout
    assert (checkout / ".venv-horovod").stat().st_ino == thin, "it was made anew under its users"
    with (checkout / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    other = make(checkout)
    assert other.returncode == 0 and "building" in other.stdout
    assert (shared / ".complete").exists() and len(built(checkout)) == 2
    (beside,) = built(checkout) - {shared}
    (link,) = (checkout / ".venv-horovod").rglob("built.pth")
    assert str(beside) in link.read_text()


def test_a_build_that_fails_is_begun_again_and_leaves_no_scratch(checkout: Path) -> None:
    assert make(checkout, BROKEN="1").returncode != 0
    assert not [*checkout.parent.glob("tmp.*")]
    assert not (checkout / ".venv-horovod").exists()
    again = make(checkout)
    assert again.returncode == 0 and "building" in again.stdout
    assert not [*checkout.parent.glob("tmp.*")]


def test_horovodrun_may_be_imported_again_by_the_processes_it_starts(checkout: Path) -> None:
    assert make(checkout).returncode == 0
    program = checkout / ".venv-horovod" / "bin" / "horovodrun"
    assert os.access(program, os.X_OK)
    runpy.run_path(str(program), run_name="__mp_main__")  # as multiprocessing does: nothing starts
