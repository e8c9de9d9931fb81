"""Pages: the fenced blocks of README.md and docs/, played in order as a reader would.

What a block is depends on its language and its head:

* ``bash``: commands, one a line (``\\`` continues), run in a folder that holds what the
  repository's root does. ``# exit code N`` behind one says how it ends.
* ``text`` behind ``bash`` or ``python``: lines of its output, in order; ``...``: anything.
* ``python`` and ``yaml`` that name a file in a comment at their head: where the repository has that
  file, an excerpt of it; else the file is written.
* other ``python``: run; blocks without a command between them share one process and namespace.
* other ``yaml``: has to be readable.
* ``sh``: commands that change the reader's machine or shell; not run.
* ``py`` and ``yml``: what is written for another library; not run, but it has to be readable.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.rigs import cli, process

ROOT = process.ROOT
LIMIT = 120.0
"""Seconds for one command; far more than any needs."""

LANGUAGES = ("bash", "text", "python", "yaml", "sh", "py", "yml", "")
_FENCE = re.compile(r"^```(\w*)$")
_FILE = re.compile(r"^# ([\w./-]+\.(?:py|yaml))$")
_EXIT_CODE = re.compile(r"\s+# exit code (\d+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line that its text begins at."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that it names in its first line; an experiment's first line is Hydra's."""
        heads = (_FILE.match(line) for line in self.text.splitlines()[:2])
        return next((head[1] for head in heads if head), None)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    language, lines, start = None, [], 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, lines, start = fence[1], [], number + 1
        else:
            found.append(Block(language, "\n".join(lines) + "\n", start))
            language = None
    assert language is None, f"{page.name}: the block at line {start} has no end"
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def table(page: Path, head: str) -> list[list[str]]:
    """The cells of the table whose header begins with ``| head |``, without their back-ticks."""
    lines = page.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def commands(text: str) -> Iterator[tuple[str, int]]:
    """The commands of a bash block, each with the exit code that it should have."""
    for line in text.replace("\\\n", " ").splitlines():
        code = _EXIT_CODE.search(line)
        command = line[: code.start()] if code else line
        if command and not command.startswith("#"):
            yield command, int(code[1]) if code else 0


class Player:
    """Plays one page.

    Args:
        page: the page.
        folder: an empty folder, which gets what a reader finds in the repository's root.
        started_anew: so many commands ``python FILE ...`` are started as the shell does. Those
            after them run in forks of a process that has imported the engine: new processes as
            any other, three seconds sooner there.
    """

    def __init__(self, page: Path, folder: Path, *, started_anew: int = 0) -> None:
        self._page = page
        self._folder = folder
        self._started_anew = started_anew
        self._output: str | None = None
        self._python = ""
        (folder / "tools").symlink_to(ROOT / "tools")
        shutil.copytree(ROOT / "configs", folder / "configs")

    def play(self) -> None:
        """Play every block; the first that does not do what the page says fails."""
        for block in blocks(self._page):
            place = f"{self._page.name}:{block.line}"
            if block.language not in ("python", "text", "py", "yml"):
                self._run_python()
            if block.file is not None and block.language not in ("py", "yml"):
                self._file(block, place)
            elif block.language == "bash":
                self._bash(block, place)
            elif block.language == "text":
                self._check_output(block, place)
            elif block.language == "python":
                # Empty lines first, so that a traceback has the page's own line numbers.
                self._python += "\n" * (block.line - 1 - self._python.count("\n")) + block.text
            elif block.language in ("yaml", "yml"):
                yaml.safe_load(block.text)
            elif block.language == "py":
                compile(block.text, place, "exec")
            else:
                assert block.language in LANGUAGES, f"{place}: {block.language} is not known here"
        self._run_python()

    def _file(self, block: Block, place: str) -> None:
        assert block.file is not None
        ours = ROOT / block.file
        if ours.exists():
            shown = block.text.split("\n", 1)[1]
            assert is_excerpt(shown, ours.read_text()), f"{place} is no part of {block.file}"
        else:
            path = self._folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)

    def _bash(self, block: Block, place: str) -> None:
        self._output = ""
        for command, expected in commands(block.text):
            words = shlex.split(command)
            plain = not set("$|;&") & set(command)  # nothing that only a shell understands
            is_ours = plain and words[0] == "python" and words[1].endswith(".py")
            self._started_anew -= is_ours
            if is_ours and self._started_anew < 0:
                file, *rest = words[1:]
                ended = process.start(cli.go_on_as, file, rest, self._folder).wait(LIMIT)
                code, output = _as_shells_say(ended.code), ended.output
            else:
                code, output = self._shell(command)
            assert code == expected, f"{place}: {command}\nended with {code}:\n{output}"
            self._output += output

    def _shell(self, command: str) -> tuple[int, str]:
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env={**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        return ended.returncode, ended.stdout

    def _run_python(self) -> None:
        if not self._python:
            return
        code, self._python = self._python, ""
        ended = process.start(_run_code, code, str(self._page), str(self._folder)).wait(LIMIT)
        assert ended.code == 0, f"{self._page.name}: ended with {ended.code}:\n{ended.output}"
        self._output = ended.output

    def _check_output(self, block: Block, place: str) -> None:
        self._run_python()
        assert self._output is not None, f"{place}: output of which command?"
        missing = first_missing(block.text.splitlines(), self._output.splitlines())
        assert missing is None, f"{place}: {missing!r} is not in the output:\n{self._output}"


def is_excerpt(shown: str, source: str) -> bool:
    """Whether ``shown``, indented by some amount, stands in ``source`` as it is."""
    for depth in range(0, 12, 4):
        if textwrap.indent(shown.rstrip("\n"), " " * depth) in source:
            return True
    return False


def first_missing(wanted: list[str], lines: list[str]) -> str | None:
    """The first of the ``wanted`` lines that does not come in ``lines``, after those before it."""
    rest = iter(lines)
    for want in wanted:
        parts = (re.escape(part) for part in want.rstrip().split("..."))
        pattern = re.compile(".*".join(parts))
        if not any(pattern.fullmatch(line.rstrip()) for line in rest):
            return want
    return None


def _as_shells_say(code: int) -> int:
    """128 and the signal's number, where Python says minus the number."""
    return code if code >= 0 else 128 - code


# --- inside a new process ---


def _run_code(code: str, page: str, folder: str) -> None:
    os.chdir(folder)
    sys.argv = [page]
    sys.path[0] = folder
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), namespace)
