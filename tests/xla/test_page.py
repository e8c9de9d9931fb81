"""docs/xla.md is true: what it shows is run."""

from __future__ import annotations

from pathlib import Path

from tests.docs import pages


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    pages.Player(pages.ROOT / "docs" / "xla.md", tmp_path).play()
