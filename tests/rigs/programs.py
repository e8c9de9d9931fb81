"""Programs that a package brings, as this environment has them: it may lack their scripts."""

from __future__ import annotations

import sys
from pathlib import Path


def horovodrun(folder: Path) -> Path:
    """A program ``horovodrun`` in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "horovodrun"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m horovod.runner.launch "$@"\n')
    program.chmod(0o755)
    return program
