"""docs/horovod.md is true: what it shows is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs import pages
from tests.rigs import programs


def test_every_block_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = programs.horovodrun(tmp_path / "bin")
    monkeypatch.setenv("PATH", os.pathsep.join([str(place.parent), os.environ["PATH"]]))
    (tmp_path / "page").mkdir()
    pages.Player(pages.ROOT / "docs" / "horovod.md", tmp_path / "page").play()
