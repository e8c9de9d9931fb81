"""Reports for people: numbers, times and rates as text, and how fast the training goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

Rows = list[tuple[str, str]]
"""Labels and texts."""


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


def size(count: float) -> str:
    """Bytes as ``232 B``, ``4.8 kB``, ``412 MB``, ``1.2 GB``."""
    units = ("B", "kB", "MB", "GB")
    power = 0
    while count >= 999.5 and power + 1 < len(units):
        count, power = count / 1000, power + 1
    digits = 1 if power and count < 9.95 else 0
    return f"{count:.{digits}f} {units[power]}"


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


def fitting(parts: Sequence[tuple[int, str]], width: int) -> list[str]:
    """The texts that fit into ``width`` columns, with two columns between them.

    Args:
        parts: texts, each with a number: the one with the highest is left out first, of two alike
            the later; what has 0 stays.
    """
    kept = list(parts)
    while kept and sum(len(text) + 2 for _, text in kept) - 2 > width:
        rank, place = max((rank, place) for place, (rank, _) in enumerate(kept))
        if not rank:
            break
        del kept[place]
    return [text for _, text in kept]


def folded(parts: Iterable[str], width: int, indent: int = 2) -> str:
    """The texts in lines of at most ``width`` columns, broken between two texts."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(" " * indent * bool(lines) + part)
    return "\n".join(lines)


def speed(rate: float) -> str:
    """``12,345 samples/s``, below 10 with a decimal."""
    return f"{rate:,.0f} samples/s" if rate >= 9.95 else f"{rate:.1f} samples/s"


def share(part: float) -> str:
    """``12 %``, of at most 100, in a fixed width."""
    return f"{round(100 * min(part, 1.0)):>2} %"


def losses(row: Mapping[str, float]) -> list[str]:
    """``loss 0.1234``; where a step records none but its parts, each of them."""
    names = ["loss"] if "loss" in row else [n for n in row if n.startswith("loss/")]
    return [f"{name} {number(row[name])}" for name in names]


def rates(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """``lr 3.1e-03`` of each optimizer; groups with different rates as ``1.0e-04..3.1e-03``.

    These are the rates that the last update used.
    """
    parts = []
    for name, optimizer in optimizers.items():
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if rates:
            low, high = f"{min(rates):.1e}", f"{max(rates):.1e}"
            label = "lr" if len(optimizers) == 1 else f"{name} lr"
            parts.append(f"{label} {low if low == high else f'{low}..{high}'}")
    return parts


class Columns:
    """Lines whose texts stand below each other, as far as can be known before the next one."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def line(self, texts: Sequence[str]) -> str:
        """One line; what begins with a digit stands to the right of its column."""
        self._widths += [0] * (len(texts) - len(self._widths))
        padded = []
        for place, text in enumerate(texts):
            width = self._widths[place] = max(self._widths[place], len(text))
            padded.append(text.rjust(width) if text[:1].isdigit() else text.ljust(width))
        return "  ".join(padded).rstrip()


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

    @property
    def seconds(self) -> float:
        """Length of the stretch up to now, without its pauses."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._spent + running

    def rate(self, samples: int) -> float | None:
        """Samples per second; None when no sample was done in the stretch.

        Args:
            samples: samples done by now, counted as for :meth:`start`.
        """
        seconds = self.seconds
        done = samples - self._samples
        return done / seconds if done > 0 and seconds > 0 else None
