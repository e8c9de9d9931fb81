"""Rows: what hook ``metrics_file`` has written, read again, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every line that is a row or an event; none, where there is no file.

    What is no such line is passed over: the last one of a run that goes on, or that was killed,
    may be half a line.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "update" in row and "phase" in row:
                yield row


def is_loss(name: str) -> bool:
    """The loss, or a part of it, such as ``loss/penalty``."""
    return name.split("/")[0] == "loss"


def is_rate(name: str) -> bool:
    """A learning rate: ``lr``, ``lr/head``, ``generator/lr``."""
    return "lr" in name.split("/")
