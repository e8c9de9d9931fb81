"""The plan drawn by matplotlib: the time line, the schedules, the memory."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from phaseloop.tools.planning.memory import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

    from phaseloop.tools.planning.plan import Plan
    from phaseloop.tools.planning.timeline import Span

COLOURS = ("#4f5bd5", "#0f9d8a", "#d97706", "#d6336c", "#7c3aed", "#2b8acb", "#7a8a0f", "#64748b")
INK, PALE = "#1f2937", "#9aa4b2"
WIDTH = 10.0  # inches
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text, in the page's own letters
    "svg.hashsalt": "plan",  # so the same plan is the same file
    "text.parse_math": False,  # a name may have a dollar sign in it
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": "#e5e9f0",
    "legend.frameon": False,
}
_MANY = 80  # epochs: more cannot be told apart
_LEGEND = 12  # groups: more than a legend has room for
_NOMINAL = 0.15  # how wide a stage of unknown length is drawn, as a part of what is known


def whole(plan: Plan) -> bytes:
    """All of it as one PNG."""
    rows = -(-len(plan.curves.panels) // 2)
    heights = [1.9, 2.6 * rows, 1.1 + 0.22 * len(plan.memory.parts)]

    def draw(figure: Figure) -> None:
        figure.suptitle(f"plan of {plan.name}", x=0.01, ha="left", fontsize=14, weight="bold")
        present = [height for height in heights if height]
        parts = list(figure.subfigures(len(present), 1, height_ratios=present, squeeze=False).flat)
        _timeline(parts[0], plan)
        if rows:
            _schedules(parts[1], plan)
        _memory(parts[-1], plan)

    return _made(draw, (WIDTH, sum(heights) + 0.5), "png")


def timeline(plan: Plan) -> str:
    """The stages, epochs, tests and saves as an SVG."""
    return _svg(lambda figure: _timeline(figure, plan), (WIDTH, 1.9))


def schedules(plan: Plan) -> str:
    """The curves as an SVG; empty where there are none."""
    rows = -(-len(plan.curves.panels) // 2)
    if not rows:
        return ""
    return _svg(lambda figure: _schedules(figure, plan), (WIDTH, 2.6 * rows))


# --- the time line ---

_LETTER = 0.0085  # how wide a letter is, as a part of the picture
_MARK = 0.011  # a triangle or square, with room on its sides


def _timeline(figure: FigureBase, plan: Plan) -> None:
    axes = figure.add_subplot()
    known = max((span.stop for span in plan.spans), default=0)
    opens = sum(bool(span.open) for span in plan.spans)
    nominal = max(1.0, _NOMINAL * known)
    end = known + opens * nominal or 1.0
    at = 0.0  # what open stages have moved the later ones by
    for number, span in enumerate(plan.spans):
        width = nominal if span.open else float(span.stop - span.start)
        _Stage(axes, span, span.start + at, width, end, COLOURS[number % len(COLOURS)]).draw()
        at += width if span.open else 0.0
    axes.set(ylim=(-0.1, 3.4), yticks=[0.4, 1.2, 2.3], yticklabels=["save", "test", "train"])
    axes.set_xlim(-0.012 * end, 1.012 * end)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if opens:  # nobody knows which update lies where
        axes.set_xticks([])
        axes.set_xlabel("not to scale")
    else:
        axes.set_xlabel("update")
        for update in plan.curves.risen:
            _rise(axes, update)


@dataclass(frozen=True)
class _Stage:
    """A stage on the time line.

    Attributes:
        start, width: where it is drawn, in updates.
        end: where the picture ends.
    """

    axes: Axes
    span: Span
    start: float
    width: float
    end: float
    colour: str

    def draw(self) -> None:
        """Its bar, what stands in it, and its tests and saves."""
        edges = self._placed([self.span.start, *self.span.borders])
        if 1 < len(edges) <= _MANY and not self.span.open:
            self._epochs(edges)
        elif self.width:
            self._bar(self.start, self.width, 0.25)
            style = "--" if self.span.open else "-"
            box = [(self.start, self.width)], (1.8, 1.0)
            self.axes.broken_barh(*box, facecolor="none", edgecolor=self.colour, ls=style)
        self._write(2.45, self._labels(), weight="bold")
        if self.span.crowded:
            self._write(0.8, ["too many to draw", "..."], color=PALE, style="italic")
        self._marks(self.span.tests, 1.2, "v")
        self._marks(self.span.saves, 0.4, "s")

    def _placed(self, updates: list[int]) -> list[float]:
        return [update - self.span.start + self.start for update in updates]

    def _bar(self, start: float, width: float, alpha: float) -> None:
        self.axes.broken_barh([(start, width)], (1.8, 1.0), facecolor=self.colour, alpha=alpha)

    def _epochs(self, edges: list[float]) -> None:
        first, _ = self.span.epochs
        for n, (left, right) in enumerate(pairwise(edges)):
            self._bar(left, right - left, 0.42 if n % 2 else 0.25)
            if (right - left) / self.end > 3 * _LETTER:
                middle = (left + right) / 2
                self.axes.text(middle, 1.92, str(first + n), ha="center", size=7, color=self.colour)

    def _labels(self) -> list[str]:
        """What may stand in it: the first that there is room for."""
        span, (_, epochs) = self.span, self.span.epochs
        length = span.open or f"{span.stop - span.start:,} updates"
        epochs_too = length
        if not span.open and epochs == epochs and epochs:
            epochs_too += f" in {epochs:.4g} epoch{'' if epochs == 1 else 's'}"
        if not span.name:
            return [epochs_too, length]
        return [f"{span.name}: {epochs_too}", f"{span.name}: {length}", span.name]

    def _write(self, height: float, texts: list[str], **options: Any) -> None:
        room = self.width / self.end / _LETTER
        for text in texts:
            if len(text) <= room:
                middle = self.start + self.width / 2
                self.axes.text(middle, height, text, ha="center", va="center", **options)
                return

    def _marks(self, places: list[int], height: float, mark: str) -> None:
        moved = self._placed(places)
        if len(places) * _MARK > max(self.width / self.end, _MARK):  # they would cover one another
            self.axes.vlines(moved, height - 0.13, height + 0.13, color=self.colour, lw=0.8)
        elif moved:
            heights = [height] * len(moved)
            self.axes.plot(moved, heights, mark, color=self.colour, ms=5, ls="", clip_on=False)


def _rise(axes: Axes, update: float) -> None:
    axes.axvline(update, ymin=0.54, ymax=0.94, color=INK, lw=1, ls=":")
    axes.annotate("warm-up over", (update, 3.0), (4, 0), textcoords="offset points", size=7)


# --- the schedules ---


def _schedules(figure: FigureBase, plan: Plan) -> None:
    curves, panels = plan.curves, list(plan.curves.panels)
    columns = min(2, len(panels))
    for number, (name, option) in enumerate(panels):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, number + 1)
        groups = plan.groups[name]
        for index, label in enumerate(groups):
            if (name, option, index) in curves.lines:
                places, values = curves.lines[name, option, index]
                colour = COLOURS[index % len(COLOURS)]
                # The later ones thinner, so that what lies below them can be seen.
                thick = 2 + 2 * (1 - (index + 1) / len(groups))
                axes.plot(places, values, label=label, color=colour, lw=thick)
                if len(groups) == 1:
                    axes.fill_between(
                        places, values, min(0.0, *values), color=colour, alpha=0.1, lw=0
                    )
        for border in (*curves.borders, *curves.risen):
            axes.axvline(border + 0.5, color=PALE, ls=":")
        title = option.replace("_", " ")
        axes.set(xlabel="update", title=f"{name}: {title}" if len(plan.groups) > 1 else title)
        axes.ticklabel_format(axis="y", scilimits=(-4, 4))
        axes.margins(x=0.012)
        axes.grid()
        axes.set_axisbelow(True)
        if 1 < len(groups) <= _LEGEND:
            axes.legend()


# --- the memory ---


def _memory(figure: FigureBase, plan: Plan) -> None:
    axes = figure.add_subplot()
    parts = plan.memory.parts
    for row, part in enumerate(parts):
        axes.barh(-row, part.bytes, color=COLOURS[row % len(COLOURS)], alpha=0.8, height=0.7)
        axes.annotate(
            size(part.bytes), (part.bytes, -row), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks([-row for row in range(len(parts))], [part.name for part in parts])
    axes.set(xticks=[], title=plan.memory.lines()[0].split(maxsplit=1)[1])
    axes.margins(x=0.15)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


# --- to a file ---


def _svg(draw: Callable[[Figure], None], inches: tuple[float, float]) -> str:
    text = _made(draw, inches, "svg").decode()
    return text[text.index("<svg") :]


def _made(draw: Callable[[Figure], None], inches: tuple[float, float], form: str) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # A name in letters that its font lacks: the page has them, and the PNG boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        clear = form == "svg"
        metadata = {"Date": None} if clear else None
        figure.savefig(stream, format=form, dpi=120, transparent=clear, metadata=metadata)
    return stream.getvalue()
