"""Makes every picture of README and the pages from real runs: ``make screenshots``, some minutes.

Terminals are played through a terminal emulator; pages are looked at in Debian's Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte
from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.rigs import board, browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LARGEST = 200_000
"""Bytes of a picture."""

COLUMNS, LINES = 110, 30
RUN, SLOW = "runs/digits", "runs/slow"
ENDS = 600.0
"""Seconds in which a command has to end."""


def main() -> None:
    """Make all pictures."""
    place = Path(tempfile.gettempdir()) / "phaseloop"  # which can be read in the pictures
    place.mkdir()
    try:
        print("training", flush=True)
        during, after = trained(place)
        terminal(during, place / "progress.png")
        terminal(after, place / "finished.png")
        command(place, "tools/run.py", "config=digits", f"run.dir={SLOW}", "optimizer.lr=0.02")
        command(place, "tools/plot.py", RUN, SLOW)
        command(place, "tools/run.py", "config=digits", "run.dir=runs/look", "plan=true")
        command(place, "tools/find_lr.py", "config=digits", "run.dir=runs/range")
        pictures = {
            "progress": place / "progress.png",
            "finished": place / "finished.png",
            "digits": place / RUN / "curves.png",
            "find_lr": place / "runs/range/find_lr/find_lr.png",
            "plan": page(place / "runs/look/plan.html", place / "plan.png", 1600),
            "plot": page(place / "runs/plot/plot.html", place / "plot.png", 1000),
            "tensorboard": tensorboard(place / RUN, place / "tensorboard.png"),
        }
        for name, file in pictures.items():
            keep(file, IMAGES / f"{name}.png")
    finally:
        shutil.rmtree(place)


def command(place: Path, program: str, *words: str) -> None:
    """A command to its end, in a terminal."""
    print(program, *words, flush=True)
    screen = Terminal(place, program, *words)
    screen.play(lambda: False)


# --- terminals ---


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, place: Path, program: str, *words: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1",
                       "PYTHONPATH": str(ROOT), "COLORTERM": "truecolor"}  # fmt: skip
        self._child = pexpect.spawn(
            sys.executable, [str(ROOT / program), *words], cwd=str(place), env=environment,
            dimensions=(LINES, COLUMNS), timeout=1,
        )  # fmt: skip

    def play(self, enough: Callable[[], bool]) -> bool:
        """Until it is enough, or the program has ended; whether it has.

        Raises:
            RuntimeError: it has ended with an error, or hangs.
        """
        until = time.monotonic() + ENDS
        while not enough():
            if time.monotonic() > until:
                raise RuntimeError("it hangs")
            try:
                self._stream.feed(self._child.read_nonblocking(4096, timeout=0.2))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                self._child.close()
                if self._child.exitstatus:
                    raise RuntimeError("\n".join(self.screen.display)) from None
                return True
        return False

    def shown(self) -> Text:
        """What stands there now, with its colours, to the last line that has something."""
        lines = [self._line(number) for number in range(LINES)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        return Text("\n").join(lines)

    def _line(self, number: int) -> Text:
        line = Text()
        for column in range(COLUMNS):
            cell = self.screen.buffer[number][column]
            line.append(cell.data, _style(cell))
        line.rstrip()
        return line


def _style(cell: Any) -> Style:
    return Style(color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold,
                 italic=cell.italics, underline=cell.underscore, reverse=cell.reverse)  # fmt: skip


def _colour(name: str) -> str | None:
    """Rich's name for what the emulator calls it: some digits, or a name."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    name = name.replace("brown", "yellow")
    return re.sub("^bright", "bright_", name)


def trained(place: Path) -> tuple[Text, Text]:
    """Digits, as a terminal shows it in its middle and at its end."""
    run = Terminal(place, "tools/run.py", "config=digits")
    rows = place / RUN / "metrics.jsonl"

    def half() -> bool:
        done = rows.exists() and '"update": 120' in rows.read_text()
        return done and any("%" in line for line in run.screen.display)

    if run.play(half):
        raise RuntimeError("the middle was missed")
    during = run.shown()
    run.play(lambda: False)
    return during, run.shown()


def terminal(text: Text, file: Path) -> None:
    """A picture of what a terminal shows."""
    width = max(len(line) for line in text.plain.splitlines())
    console = Console(record=True, width=width + 1, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(text, soft_wrap=False, no_wrap=True)
    drawing = file.with_suffix(".svg")
    # Its font is named by an address in the network; whatever the browser has will do.
    svg = console.export_svg(title="python tools/run.py config=digits", theme=MONOKAI)
    drawing.write_text(svg)
    with browser.opened(drawing.as_uri(), width=1400, height=1000) as driver:
        driver.save_screenshot(str(file))
    image = Image.open(file).convert("RGB")
    box = _drawn(image)
    image.crop(box).save(file)


def _drawn(image: Image.Image) -> tuple[int, int, int, int]:
    """What is not the white of the page."""
    from PIL import ImageChops

    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    assert box is not None, "nothing is there"
    return box


# --- pages ---


def page(file: Path, to: Path, height: int) -> Path:
    """The beginning of a page in a browser."""
    with browser.opened(file.as_uri(), height=height) as driver:
        time.sleep(1.0)
        driver.save_screenshot(str(to))
    return to


def tensorboard(run: Path, to: Path) -> Path:
    """TensorBoard's curves of a run."""
    with (
        board.serving(run) as served,
        browser.opened(f"{served.url}#timeseries&tagFilter=test|train|^lr", height=1000) as driver,
    ):
        time.sleep(15.0)
        driver.find_element("xpath", "//button[contains(., 'Settings')]").click()  # hides them
        time.sleep(2.0)
        driver.save_screenshot(str(to))
    return to


def keep(file: Path, to: Path) -> None:
    """A copy of few colours.

    Raises:
        RuntimeError: it is too large all the same.
    """
    image = Image.open(file).convert("RGB")
    few = image.quantize(colors=255, dither=Image.Dither.NONE)
    few.save(to, optimize=True)
    size = to.stat().st_size
    print(f"{to.relative_to(ROOT)}  {image.width} x {image.height}, {size // 1000} kB", flush=True)
    if size > LARGEST:
        raise RuntimeError(f"{to} has more than {LARGEST} bytes")


if __name__ == "__main__":
    main()
