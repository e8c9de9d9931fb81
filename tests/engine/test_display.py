"""Display: what a terminal shows, as pyte renders it, at several widths."""

import sys

import pyte
import pytest

from phaseloop.engine.display import Bar, Display
from tests.rigs.terminal import Terminal

TRAIN = Bar("epoch  3/10", 690, 2300, to_go="1 min 20 s to go")
TEST = Bar("test", 12, 40, "batches")
FACTS = [
    (0, "loss 0.1234"),
    (2, "lr 3.1e-03"),
    (1, "12,345 samples/s"),
    (3, "data wait 12 %"),
    (4, "412 MB"),
]
FACTS_WIDTH = 11 + 2 + 10 + 2 + 16 + 2 + 14 + 2 + 6


@pytest.fixture
def shown(monkeypatch):
    """Draws on a terminal so wide; gives the lines that it shows, and what was sent to it."""

    def show(width, *drawings, printed=(), close=False):
        terminal = Terminal(monkeypatch, width)
        display = Display()
        for bars, facts in drawings:
            display.show(bars, facts)
            for text in printed:
                print(text)
        if close:
            display.close()
        display._live._disable_redirect_io()
        text = terminal.close()
        screen = pyte.Screen(width, 20)
        pyte.Stream(screen).feed(text)
        return [line.rstrip() for line in screen.display if line.strip()], screen, display

    return show


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_two_lines_at_any_width(shown, width):
    lines, screen, display = shown(width, ([TRAIN], FACTS), ([TRAIN, TEST], []))
    assert len(lines) == display.lines == 2, lines
    assert lines[0].startswith("epoch  3/10") and "690/2,300" in lines[0]
    assert lines[1].startswith("test") and "12/40 batches" in lines[1]
    assert screen.cursor.y == 1  # at the end of the last


def test_the_bar_is_as_long_as_its_part(shown):
    (line,), _, _ = shown(80, ([Bar("epoch 1/2", 1, 4)], ()))
    bar = line.removeprefix("epoch 1/2  ").split(" ")[0]
    assert len(bar) == 40


def test_what_is_least_important_goes_first(shown):
    for width, missing in [
        (FACTS_WIDTH, ()),
        (FACTS_WIDTH - 1, ("412 MB",)),
        (FACTS_WIDTH - 8 - 1, ("412 MB", "data wait")),
        (FACTS_WIDTH - 8 - 16 - 1, ("412 MB", "data wait", "lr")),
    ]:
        lines, _, _ = shown(width, ([TRAIN], FACTS))
        words = ("loss", "lr", "samples/s", "data wait", "412 MB")
        assert [word in lines[1] for word in words] == [word not in missing for word in words]


def test_the_time_to_go_makes_room_for_the_bar(shown):
    # Label, count and the gaps behind both; a bar of 10; the time, and the gap before it.
    least = 11 + 2 + 9 + 2 + 10 + 2 + 16
    for width, there in [(least, True), (least - 1, False)]:
        lines, _, _ = shown(width, ([TRAIN], FACTS))
        assert ("to go" in lines[0]) is there
        assert "━" in lines[0]


def test_where_nobody_knows_the_end_there_is_no_bar(shown):
    lines, _, _ = shown(80, ([Bar("epoch 3", 12_345, None)], FACTS))
    assert lines[0].split() == ["epoch", "3", "12,345"]


def test_what_is_printed_stands_above(shown):
    drawn = ([TRAIN], FACTS)
    lines, _, _ = shown(80, drawn, drawn, printed=["a line", "x" * 100])
    assert lines[:3] == ["a line", "x" * 80, "x" * 20]
    assert lines[6].startswith("epoch  3/10") and len(lines) == 8


def test_errors_that_go_to_a_file_go_there(monkeypatch, capsys):
    terminal = Terminal(monkeypatch)  # of standard output alone
    display = Display()
    display.show([TRAIN])
    print("a warning", file=sys.stderr)
    display.close()
    assert "a warning" not in terminal.close()
    assert capsys.readouterr().err == "a warning\n"


def test_nothing_is_left_behind(shown):
    lines, screen, display = shown(80, ([TRAIN], FACTS), close=True, printed=["a line"])
    assert lines == ["a line"]
    assert display.lines == 0
    assert screen.cursor.y == 1 and not screen.cursor.hidden
