"""The command line in a subprocess, and in this process where only its messages matter."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tools" / "run.py"

TINY = """\
# @package _global_
defaults:
  - override /optimizer: sgd
  - _self_
imports: [tests.rigs.tiny]
run: {threads: 1}
phases: {epochs: 3}
data:
  train: {dataset: {name: tiny_data}, batch_size: 4}
  test: {dataset: {name: tiny_data, samples: 10}, batch_size: 4}
model: {name: tiny_model}
meters: {test: {accuracy: {}}}
hooks: {tensorboard: null, curves: null, progress: null}
"""


def folder(path: Path, **files: str) -> Path:
    """``path`` with ``configs/config/tiny.yaml`` and, by name, further experiments."""
    experiments = path / "configs" / "config"
    experiments.mkdir(parents=True, exist_ok=True)
    for name, text in {"tiny": TINY, **files}.items():
        (experiments / f"{name}.yaml").write_text(text)
    return path


def environment() -> dict[str, str]:
    """One thread, and the tests importable."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(words: Sequence[str], cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The whole program with these words, in ``cwd``."""
    return subprocess.run(
        [sys.executable, str(RUN), *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(
    words: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[str]:
    """The same, not waited for, with further variables in its environment."""
    return subprocess.Popen(
        [sys.executable, str(RUN), *words],
        cwd=cwd,
        env={**environment(), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=start_new_session,
    )
