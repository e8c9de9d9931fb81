"""The command line: in a subprocess; in a fork, which is a new process too; in this process."""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rigs import nursery, process

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


def wait_for(path: Path, job: "subprocess.Popen[str] | Fork", seconds: float = 60) -> None:
    """Until the file is there.

    Raises:
        AssertionError: the job has ended, or takes longer.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def let_go(probe: Path, job: "subprocess.Popen[str] | Fork", seconds: float = 60) -> None:
    """A job that waits in ``tiny_probe`` goes on as soon as the signal that it was sent is there.

    Args:
        probe: the probe's file.
    """
    wait_for(Path(f"{probe}.told"), job, seconds)
    Path(f"{probe}.go").touch()


# --- in a fork: as true a process, which has imported the engine already: five seconds sooner ---


def forked(
    words: Sequence[str], cwd: Path, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """The same as :func:`run`."""
    with tempfile.TemporaryDirectory() as made:
        files = [Path(made) / "stdout", Path(made) / "stderr"]
        ended = process.start(go_on_as, RUN, words, cwd, environment(), files).wait(timeout)
        texts = [file.read_text() for file in files]
        return subprocess.CompletedProcess(list(words), ended.code, *texts)


class Fork:
    """The same as what :func:`start` gives, in so far as tests use it."""

    def __init__(self, words: Sequence[str], cwd: Path) -> None:
        self.words = list(words)
        self.returncode: int | None = None
        self._output = ""
        self._running = process.start(go_on_as, RUN, words, cwd, environment())
        self.pid = self._running.pid

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        if self.returncode is None and (ended := self._running.ended(0.01)) is not None:
            self.returncode, self._output = ended.code, ended.output
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal; one that has ended does not mind."""
        self._running.send(number)

    def communicate(self, timeout: float = process.LIMIT) -> tuple[str, None]:
        """What it has printed, once it has ended; one that hangs is ended, and shown."""
        if self.returncode is None:
            ended = self._running.wait(timeout)
            self.returncode, self._output = ended.code, ended.output
        return self._output, None


def go_on_as(
    file: Path,
    words: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    streams: Sequence[Path] = (),
) -> None:
    """In a new process: be what ``python FILE WORDS`` is, in ``cwd``.

    Args:
        variables: all of its environment; None: this process's.
        streams: files that take its output and its errors; none: where they go now.
    """
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    if variables is not None:
        os.environ.clear()
        os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = [str(file), *words]
    sys.path[:1] = [str(Path(file).absolute().parent), str(ROOT)]
    if any(word.startswith("backend") for word in words):
        nursery.open_one()
    runpy.run_path(str(file), run_name="__main__")
