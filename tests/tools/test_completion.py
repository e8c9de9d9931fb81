"""Completion by Tab, in a bash of its own, set up by the command that the page gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.docs import pages
from tests.rigs import cli

PAGE = pages.ROOT / "docs" / "configuration.md"
LIMIT = 120


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pexpect.spawn[str]]:
    """A terminal in a folder with an experiment of its own."""
    (set_up,) = (b.text for b in pages.blocks(PAGE) if "install=bash" in b.text)
    home = cli.folder(tmp_path_factory.mktemp("home"), digressions=cli.TINY)
    (home / "tools").symlink_to(pages.ROOT / "tools")
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bash = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile"],
        cwd=str(home),
        env={**cli.environment(), "PATH": paths, "PS1": "> ", "TERM": "dumb", "HOME": str(home)},
        encoding="utf-8",
        timeout=LIMIT,
        dimensions=(40, 200),
    )
    bash.expect_exact("> ")
    for line in (*set_up.strip().splitlines(), "bind 'set enable-bracketed-paste off'"):
        bash.sendline(line)
        bash.expect_exact("\r\n> ")
    yield bash
    bash.close(force=True)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("config=digr", "essions"),  # an experiment in the folder's own configs/
        ("config=vicreg", "_digits"),
        ("optimizer=sg", "d"),
        ("config=vicreg_digits phases.ep", "ochs="),
    ],
)
def test_tab_completes(shell: pexpect.spawn[str], typed: str, completed: str) -> None:
    """The line as it then is is shown by echo, put before it: a part of it might stand anywhere."""
    line = f"python tools/run.py {typed}"
    shell.send(f"{line}\t")
    shell.sendcontrol("a")
    shell.sendline("echo ")
    shell.expect_exact(f"\r\n{line}{completed}\r\n")
    shell.expect_exact("> ")
