"""Rows: what hook ``metrics_file`` has written, read again, line by line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_LOG_FROM = 20.0  # the factor by which a loss has to fall


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


def on_log_axis(name: str, curves: Iterable[list[float]]) -> bool:
    """Whether these curves of one name are drawn logarithmically: a loss that falls by a factor.

    Args:
        name: of the metric.
        curves: its values; what is not finite is passed over.
    """
    if not is_loss(name):
        return False
    finite = [v for values in curves for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) > _LOG_FROM * min(finite)
