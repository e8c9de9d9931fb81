"""Reports for people: numbers, times and rates as text, and how fast the training goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


def number(value: float) -> str:
    """Four decimals where they tell enough, else powers of ten: ``0.1234``, ``1.50e-05``."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.2e}"


def duration(seconds: float) -> str:
    """``4.2 s``, ``42 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(count: int, noun: str) -> str:
    """``1 epoch``, ``1,200 epochs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def by_epoch(numbers: Mapping[int, int]) -> str:
    """``64``; where it changes, ``32, 64 from epoch 5``."""
    return ", ".join(
        f"{count:,}" if first == 1 else f"{count:,} from epoch {first}"
        for first, count in numbers.items()
    )


def aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a label and a text, the texts below each other."""
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    return [f"{label:<{width}}  {text}" for label, text in rows]


def learning_rates(optimizers: Mapping[str, Optimizer]) -> str:
    """``lr 3.1e-03``; groups with different rates as ``1.0e-04..3.1e-03``; empty: there are none.

    These are the rates that the last update used.
    """
    parts = []
    for name, optimizer in optimizers.items():
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if rates:
            low, high = f"{min(rates):.1e}", f"{max(rates):.1e}"
            label = "lr" if len(optimizers) == 1 else f"{name} lr"
            parts.append(f"{label} {low if low == high else f'{low}..{high}'}")
    return "  ".join(parts)


class Throughput:
    """Training samples per second over a stretch of the run, the pauses in it left out."""

    def __init__(self) -> None:
        self._samples = 0
        self._spent = 0.0
        self._since: float | None = None

    def start(self, samples: int) -> None:
        """Begin a new stretch; ``samples`` were done before it."""
        self._samples, self._spent = samples, 0.0
        self._since = time.monotonic()

    def pause(self) -> None:
        """What follows is no training: a test, say."""
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None

    def go_on(self) -> None:
        """The training goes on after a pause."""
        if self._since is None:
            self._since = time.monotonic()

    def rate(self, samples: int) -> float | None:
        """Samples per second; None when no sample was done in the stretch.

        Args:
            samples: samples done by now, counted as for :meth:`start`.
        """
        running = 0.0 if self._since is None else time.monotonic() - self._since
        seconds = self._spent + running
        done = samples - self._samples
        return done / seconds if done > 0 and seconds > 0 else None
