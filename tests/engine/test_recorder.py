"""The recorder: weighted means between log points, gauges, events, and what a checkpoint holds."""

from __future__ import annotations

import pytest
import torch

from phaseloop.engine.recorder import Recorder


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def row(recorder: Recorder) -> dict[str, float]:
    return {name: value for name, value in recorder.row().items() if name != "time"}


def test_a_row_is_the_weighted_mean_since_the_last() -> None:
    recorder = Recorder(every=2)
    recorder.add("loss", one(1.0), 4)
    recorder.tick(1)
    assert not recorder.due
    recorder.begin_step()
    recorder.add("loss", one(2.5), 2)
    recorder.tick(2)
    assert recorder.due
    assert row(recorder) == {"loss": (4 * 1.0 + 2 * 2.5) / 6}
    recorder.begin_step()
    assert not recorder.due
    recorder.add("loss", one(7.0), 1)
    recorder.tick(3)
    recorder.begin_step()
    recorder.tick(4)
    assert row(recorder) == {"loss": 7.0}


def test_a_row_is_due_after_every_so_many_updates() -> None:
    recorder = Recorder(every=3)
    due = []
    for update in range(1, 10):
        recorder.begin_step()
        recorder.tick(update)
        due.append(recorder.due)
    assert due == [False, False, True] * 3


def test_every_sink_gets_the_same_row() -> None:
    recorder = Recorder(every=1)
    recorder.add("loss", one(1.0))
    recorder.tick(1)
    assert recorder.row() is recorder.row()


def test_weight_0_is_left_out() -> None:
    recorder = Recorder(every=1)
    recorder.add("loss", one(float("nan")), 0)
    recorder.add("other", one(float("inf")), 0.0)
    recorder.add("other", one(3.0), 2)
    recorder.tick(1)
    assert row(recorder) == {"other": 3.0}


def test_means_are_made_in_double_precision() -> None:
    # Summed in float32, 2**24 ones and one more make 2**24.
    recorder = Recorder(every=1)
    recorder.add("loss", one(1.0), 2.0**24)
    recorder.add("loss", one(3.0), 1)
    recorder.tick(1)
    assert row(recorder) == {"loss": (2.0**24 + 3) / (2.0**24 + 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_values_of_any_number_type(dtype: torch.dtype) -> None:
    recorder = Recorder(every=1)
    recorder.add("value", one(1, dtype))
    recorder.add("value", one(2.0))
    recorder.tick(1)
    assert row(recorder) == {"value": 1.5}


def test_a_gauge_is_the_number_of_the_moment_and_stays() -> None:
    recorder = Recorder(every=1)
    recorder.gauge("lr", 0.1)
    recorder.gauge("lr", 0.2)
    recorder.tick(1)
    assert row(recorder) == {"lr": 0.2}
    recorder.begin_step()
    recorder.tick(2)
    assert row(recorder) == {"lr": 0.2}


def test_events_are_those_of_this_step() -> None:
    recorder = Recorder()
    recorder.event("skip", update=3, reason="why")
    assert recorder.events == [{"event": "skip", "update": 3, "reason": "why"}]
    recorder.begin_step()
    assert recorder.events == []


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_many_values_are_added_up_and_the_mean_stays(count: int) -> None:
    recorder = Recorder(every=1)
    for number in range(count):
        recorder.add("value", one(float(number)), 1 + number % 3)
    assert len(recorder.state_dict()["series"]["value"][1]) <= 1024
    recorder.tick(1)
    weights = [1 + number % 3 for number in range(count)]
    mean = sum(n * w for n, w in enumerate(weights)) / sum(weights)
    assert row(recorder) == {"value": pytest.approx(mean, rel=1e-12)}


def test_what_waits_for_a_log_point_survives_a_checkpoint() -> None:
    recorder, again = Recorder(every=4), Recorder(every=4)
    for update, value in enumerate([1.0, 2.0], start=1):
        recorder.begin_step()
        recorder.add("loss", one(value), 4)
        recorder.gauge("lr", value)
        recorder.tick(update)
    again.load_state_dict(recorder.state_dict())
    for each in (recorder, again):
        for update, value in enumerate([3.0, 5.0], start=3):
            each.begin_step()
            each.add("loss", one(value), 2)
            each.tick(update)
    assert row(again) == row(recorder) == {"loss": (4 * 1 + 4 * 2 + 2 * 3 + 2 * 5) / 12, "lr": 2.0}


def test_a_checkpoint_at_a_log_point_holds_nothing_that_was_logged() -> None:
    recorder, again = Recorder(every=1), Recorder(every=1)
    recorder.add("loss", one(1.0))
    recorder.tick(1)
    again.load_state_dict(recorder.state_dict())
    again.begin_step()
    again.add("loss", one(5.0))
    again.tick(2)
    assert row(again) == {"loss": 5.0}


def test_loading_forgets_what_was_there() -> None:
    recorder = Recorder(every=1)
    recorder.add("old", one(1.0))
    recorder.event("skip")
    recorder.tick(1)
    recorder.row()
    recorder.load_state_dict(Recorder().state_dict())
    assert not recorder.due
    assert recorder.events == []
    recorder.tick(2)
    assert row(recorder) == {}


def test_a_row_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(every=1)
    for name in ("a", "b", "c"):
        recorder.add(name, one(2.0), 3.0 if name == "b" else one(3.0))
        recorder.add(name, one(4.0), 1.0)
    recorder.add("none", one(1.0), one(0.0))
    waits: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: waits.append(len(t)) or tolist(t))
    for read in ("__float__", "item"):
        monkeypatch.setattr(torch.Tensor, read, lambda *_: pytest.fail("a wait of its own"))
    mean = (2.0 * 3 + 4.0) / 4
    assert row(recorder) == {"a": mean, "b": mean, "c": mean}
    assert waits == [4 + 3]  # totals, and the weights that are tensors
