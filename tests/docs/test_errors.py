"""docs/errors.md: each mistake on it is made, and the program says what the page says it does.

A section is a test. The Player runs it as it runs pages; only a block of ``sh`` is more here: what
runs in the reader's other terminal meanwhile.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import pages
from tests.rigs import cli

PAGE = pages.ROOT / "docs" / "errors.md"
SECTIONS = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)[1:]
MY_STEPS = next(block for block in pages.blocks(PAGE) if block.file == "my_steps.py")


def _title(section: str) -> str:
    return section.splitlines()[0].removeprefix("## ")


def _files(section: str, folder: Path) -> tuple[Path, Path]:
    """The section as a page of its own, and an empty folder that has the file it counts on."""
    page, home = folder / "errors.md", folder / "home"
    before = PAGE.read_text().index(section)
    page.write_text("\n" * PAGE.read_text()[:before].count("\n") + section)  # its own line numbers
    home.mkdir()
    if "[phaseloop.recipes.digits,./my_steps.py]" in section:
        (home / "my_steps.py").write_text(MY_STEPS.text)
    return page, home


@pytest.fixture
def other_terminal(tmp_path: Path) -> Iterator[list[cli.Fork]]:
    """What was started there; it is ended."""
    started: list[cli.Fork] = []
    yield started
    for fork in started:
        fork.send_signal(9)
        fork.communicate()


@pytest.mark.parametrize("section", SECTIONS, ids=_title)
def test_it_says_what_the_page_says(
    section: str, tmp_path: Path, other_terminal: list[cli.Fork]
) -> None:
    if "backend=xla" in section and importlib.util.find_spec("torch_xla"):
        pytest.skip("the package is installed")
    page, home = _files(section, tmp_path)
    player = pages.Player(page, home)
    for block in pages.blocks(page):
        if block.language == "sh":
            for command, _ in pages.commands(block.text):
                fork = cli.Fork(shlex.split(command)[2:], home)
                other_terminal.append(fork)
                _wait_for(home / "runs" / "busy" / "metrics.jsonl", fork)
    player.play()


def _wait_for(file: Path, fork: cli.Fork) -> None:
    end = time.monotonic() + pages.LIMIT
    while not (file.exists() and file.stat().st_size):
        assert fork.poll() is None, fork.communicate()
        assert time.monotonic() < end, f"no {file}"
        time.sleep(0.05)


@pytest.mark.parametrize("section", SECTIONS, ids=_title)
def test_each_shows_a_mistake_and_what_is_said(section: str, tmp_path: Path) -> None:
    page, _ = _files(section, tmp_path)
    shown = pages.blocks(page)
    codes = [code for b in shown if b.language == "bash" for _, code in pages.commands(b.text)]
    said = [line for b in shown if b.language == "text" for line in b.text.splitlines()]
    assert any(codes)
    # Each failing command has a line of its own, and no line is only dots.
    assert len(said) >= sum(code != 0 for code in codes)
    assert all(len(line.replace("...", "").split()) > 3 for line in said)


def test_there_are_twenty_at_least() -> None:
    assert len(SECTIONS) >= 20
