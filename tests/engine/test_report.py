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

    assert report.learning_rates({"optimizer": sgd(0.1)}) == "lr 1.0e-01"
    assert report.learning_rates({"optimizer": sgd(0.1, 0.1)}) == "lr 1.0e-01"
    assert report.learning_rates({"optimizer": sgd(0.1, 0.02, 0.05)}) == "lr 2.0e-02..1.0e-01"
    assert report.learning_rates({"a": sgd(1.0), "b": sgd(2.0)}) == "a lr 1.0e+00  b lr 2.0e+00"
    assert report.learning_rates({}) == ""


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
