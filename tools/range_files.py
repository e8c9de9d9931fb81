"""What a range test leaves behind: a picture of it, and its numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from phaseloop.engine.run_folder import replace_text

if TYPE_CHECKING:
    from phaseloop.tools.range_test import Found, RangeTest

PICTURE = "find_lr.png"
NUMBERS = "find_lr.json"

_BLUE, _FAINT, _RED = "#2a6fbb", "#a9c6e4", "#d1602f"


def write(found: Found, settings: RangeTest) -> None:
    """Both files into ``settings.dir``, which is made where it is missing."""
    assert settings.dir is not None
    folder = Path(settings.dir)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        "settings": dataclasses.asdict(settings),
        "base": found.base,
        "suggestion": found.suggestion,
        "ended": found.ended,
        "rates": found.rates,
        "losses": found.losses,
        "smoothed": found.smoothed,
    }
    replace_text(folder / NUMBERS, json.dumps(numbers, indent=1) + "\n")
    _draw(found, folder / PICTURE)


def _draw(found: Found, path: Path) -> None:
    """Loss over rate; what is far above the smoothed loss is cut off."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses, color=_FAINT, label="loss")
    axes.plot(found.rates, found.smoothed, color=_BLUE, label="smoothed")
    if found.suggestion is not None:
        label = f"steepest fall, at {found.suggestion:.2g}"
        axes.axvline(found.suggestion, color=_RED, linestyle="--", label=label)
    if found.smoothed:
        low, first = min(found.smoothed + found.losses), found.smoothed[0]
        height = (max(first, low) - low) or abs(low) or 1.0
        axes.set_ylim(low - 0.1 * height, low + 1.5 * height)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title=found.ended)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
