"""Display: what a terminal shows while a run goes on; a few lines, drawn anew in their place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseloop.engine.report import fitting

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BAR = (10, 40)  # columns that a bar has at least and at most
_GAP = 2  # columns between two texts


@dataclass(frozen=True)
class Bar:
    """One line with a bar.

    Args:
        label: what it is about.
        done: how much of it is done.
        total: of how much; None: nobody knows, and there is no bar.
        unit: of both, where it has to be said.
        to_go: how long the rest takes; left out where there is no room.
    """

    label: str
    done: int
    total: int | None
    unit: str = ""
    to_go: str = ""

    @property
    def count(self) -> str:
        """``690/2,300``, with its unit."""
        of = "" if self.total is None else f"/{self.total:,}"
        return f"{self.done:,}{of} {self.unit}".rstrip()


class Display:
    """Lines at the end of what was printed, which stay there: what others print comes above them.

    They are drawn when :meth:`show` is called and at no other time. No thread redraws: a worker
    forked while it holds the console's lock would hang. Nothing is left behind by :meth:`close`.

    Attributes:
        lines: how many there are now; the cursor stands at the end of the last.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.lines = 0
        self._console = Console(highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=is_terminal(sys.stderr),  # what goes to a file stays there
        )
        self._live.start()
        # rich hides the cursor; a run that is killed could never bring it back.
        self._console.show_cursor(True)

    def show(self, bars: Sequence[Bar], facts: Sequence[tuple[int, str]] = ()) -> None:
        """Draw the bars, and below them a line of facts.

        Args:
            bars: in their order.
            facts: each with a number: where they do not fit beside each other, the one with the
                highest goes first.
        """
        from rich.console import Group
        from rich.text import Text

        width = self._console.width
        parts: list[RenderableType] = [_table(bars, width)]
        if facts:
            line = "  ".join(fitting(facts, width))
            parts.append(Text(line, no_wrap=True, overflow="crop", end=""))
        self.lines = len(bars) + bool(facts)
        self._live.update(Group(*parts), refresh=True)

    def close(self) -> None:
        """Take the lines away."""
        self.lines = 0
        self._live.stop()


def is_terminal(stream: Any) -> bool:
    """Whether it is one. ``sys.stdout`` may be None, or of the user's making: it only writes."""
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def is_possible() -> bool:
    """Whether there is a terminal to draw in; rich is imported only where there is."""
    if not is_terminal(sys.stdout):
        return False
    from rich.console import Console

    return Console().is_interactive  # not so in a terminal that cannot move its cursor


def _table(bars: Sequence[Bar], width: int) -> Table:
    """The bars below each other, their columns aligned; never wider than the terminal."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def text(of: str, **options: Any) -> Text:
        return Text(of, no_wrap=True, overflow="crop", **options)

    taken = max(len(b.label) for b in bars) + max(len(b.count) for b in bars) + 2 * _GAP
    to_go = max(len(b.to_go) for b in bars)
    with_time = 0 < to_go <= width - taken - _GAP - _BAR[0]
    room = width - taken - with_time * (to_go + _GAP)
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for bar in bars:
        cells: list[RenderableType] = [text(bar.label)]
        if room >= _BAR[0]:
            drawn = bar.total is not None
            line = ProgressBar(bar.total, bar.done, min(room, _BAR[1])) if drawn else text("")
            cells.append(line)
        cells.append(text(bar.count))
        if with_time:
            cells.append(text(bar.to_go, style="dim"))
        table.add_row(*cells)
    return table
