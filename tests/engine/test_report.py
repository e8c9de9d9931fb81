"""Reports: numbers, times and rates as people read them."""

from types import SimpleNamespace

import pytest
import torch

from phaseloop.engine import report


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.98765, "0.9877"),
        (-2.5, "-2.5000"),
        (0.001, "0.0010"),
        (0.000999, "9.99e-04"),
        (9999.0, "9999.0000"),
        (12345.0, "1.23e+04"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_number(value, text):
    assert report.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration(seconds, text):
    assert report.duration(seconds) == text


def test_counted():
    assert report.counted(1, "epoch") == "1 epoch"
    assert report.counted(0, "epoch") == "0 epochs"
    assert report.counted(1200, "epoch") == "1,200 epochs"


def test_aligned():
    assert report.aligned([("a", "x"), ("long", "y")]) == ["a     x", "long  y"]
    assert report.aligned([]) == []


def test_learning_rates():
    def sgd(*rates):
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
        return torch.optim.SGD(groups)

    assert report.rates({"optimizer": sgd(0.1)}) == ["lr 1.0e-01"]
    assert report.rates({"optimizer": sgd(0.1, 0.1)}) == ["lr 1.0e-01"]
    assert report.rates({"optimizer": sgd(0.1, 0.02, 0.05)}) == ["lr 2.0e-02..1.0e-01"]
    assert report.rates({"a": sgd(1.0), "b": sgd(2.0)}) == ["a lr 1.0e+00", "b lr 2.0e+00"]
    assert report.rates({}) == []


def test_losses():
    assert report.losses({"time": 3.0, "lr": 0.1, "loss": 0.5, "loss/a": 1.0}) == ["loss 0.5000"]
    parts = {"loss/a": 1.0, "lr": 0.1, "loss/b": 2e-5}
    assert report.losses(parts) == ["loss/a 1.0000", "loss/b 2.00e-05"]
    assert report.losses({"lr": 0.1}) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9940, "9.9 kB"),
        (9960, "10 kB"),
        (999_400, "999 kB"),
        (999_600, "1.0 MB"),
        (412e6, "412 MB"),
        (1.2e9, "1.2 GB"),
        (2.5e12, "2500 GB"),
    ],
)
def test_size(count, text):
    assert report.size(count) == text


def test_speed():
    told = [report.speed(rate) for rate in (0.04, 9.94, 9.96, 12345.4)]
    assert told == [f"{text} samples/s" for text in ("0.0", "9.9", "10", "12,345")]


def test_share():
    assert [report.share(part) for part in (0.0, 0.12, 1.0, 1.3)] == [
        " 0 %",
        "12 %",
        "100 %",
        "100 %",
    ]


PARTS = [(0, "ab"), (2, "cde"), (1, "f"), (2, "gh")]
"""Of 2, 3, 1 and 2 columns: with two between them 2 + 2 + 3 + 2 + 1 + 2 + 2 = 14."""


@pytest.mark.parametrize(
    ("width", "texts"),
    [
        (14, ["ab", "cde", "f", "gh"]),
        (13, ["ab", "cde", "f"]),  # of two alike the later goes
        (10, ["ab", "cde", "f"]),
        (9, ["ab", "f"]),
        (4, ["ab"]),
        (1, ["ab"]),  # it stays, whatever
    ],
)
def test_fitting(width, texts):
    assert report.fitting(PARTS, width) == texts


def test_folded():
    texts = ["abc", "de", "f", "ghijkl"]
    assert report.folded(texts, 19) == "abc  de  f  ghijkl".strip()
    assert report.folded(texts, 17) == "abc  de  f\n  ghijkl"
    assert report.folded(texts, 7) == "abc  de\n  f\n  ghijkl"
    assert report.folded([], 7) == ""


def test_columns_stand_below_each_other():
    columns = report.Columns()
    assert columns.line(["loss 10.1", "12 s", "x"]) == "loss 10.1  12 s  x"
    assert columns.line(["loss 9.2", "7 s", "yz"]) == "loss 9.2    7 s  yz"
    assert columns.line(["loss 9.2", "7 s", "x"]) == "loss 9.2    7 s  x"
    assert columns.line(["loss 9.2"]) == "loss 9.2"


def test_throughput_leaves_pauses_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now))
    speed = report.Throughput()
    assert speed.rate(10) is None  # not started
    speed.start(100)
    assert speed.rate(100) is None  # no sample yet
    now = 2.0
    assert speed.rate(110) == 10 / 2
    speed.pause()
    now = 50.0
    assert speed.rate(110) == 10 / 2
    speed.pause()  # a second pause in the first changes nothing
    speed.go_on()
    now = 53.0
    assert speed.rate(130) == 30 / 5
    speed.start(130)
    now = 54.0
    assert speed.rate(134) == 4
