"""Hook ``average``: what is averaged, when, what a test phase sees, and what stays as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import Batch, ConfigError, Data, PhaseloopError, Phases, Run, Stage, Task, TensorData
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from phaseloop.hooks.average import Average
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs import cli, process, r1
from tests.rigs.equal import newest
from tests.rigs.probes import Break, SkipAt, watch
from tests.rigs.r0 import mean_output, numbers, r0, train, weight


def averaged(task: Task, name: str = "average") -> float:
    """The average of R0's weight."""
    return float(task.averages[name]["w"])


# --- which samples, with which weights ---


def test_ema_by_its_formula() -> None:
    # w is -1, -3, -6, -10; the first is copied: -1, (-1-3)/2, (-2-6)/2, (-4-10)/2.
    task = r0([1, 2, 3, 4], 1)
    average = Average(decay=0.5)
    train(task, average=average)
    assert averaged(task) == -7
    assert weight(task) == -10
    assert average.samples == 4


def test_ema_with_a_warm_up_of_the_decay() -> None:
    task = r0([1, 2, 3, 4], 1)
    train(task, average=Average(decay=0.3, warmup=True))
    expected = -1.0
    for k, w in ((1, -3.0), (2, -6.0), (3, -10.0)):
        decay = min(0.3, (1 + k) / (10 + k))
        expected = decay * expected + (1 - decay) * w
    assert (1 + 3) / (10 + 3) > 0.3 > (1 + 2) / (10 + 2)  # both sides of the minimum were used
    assert averaged(task) == pytest.approx(expected, rel=1e-6)


# Two updates an epoch, w = -1, -4, -5, -8, -9, -12, -13, -16.
@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, [-4, -8, -12, -16]),
        ({"start_epochs": 1}, [-8, -12, -16]),
        ({"start_epochs": 1, "every_epochs": 2}, [-8, -16]),
        ({"every_updates": 1}, [-1, -4, -5, -8, -9, -12, -13, -16]),
        ({"start_updates": 5, "every_updates": 1}, [-12, -13, -16]),
        ({"start_updates": 2, "every_updates": 3}, [-5, -12]),
        ({"start_fraction": 0.5, "every_updates": 1}, [-9, -12, -13, -16]),
        ({"start_fraction": 0.75}, [-16]),
    ],
)
def test_swa_weighs_its_samples_alike(options: dict[str, Any], samples: list[float]) -> None:
    task = r0([1, 3], 1, epochs=4)
    average = Average(kind="swa", **options)
    train(task, average=average)
    assert average.samples == len(samples)
    assert averaged(task) == pytest.approx(sum(samples) / len(samples))


def test_an_epoch_cut_short_is_no_sample() -> None:
    task = r0([1, 3], 1, phases=Phases(updates=3))
    average = Average(kind="swa")
    train(task, average=average)
    assert average.samples == 1
    assert averaged(task) == -4


def test_amp_a_a_skipped_update_moves_no_average() -> None:
    """The third of six is skipped: w = -5, and the averages have moved 5."""
    task = r0([1] * 6, 1)
    average = Average(decay=0.5)
    train(task, average=average, skip=SkipAt(3))
    assert weight(task) == -5
    assert average.samples == 5
    # -1, then four times half-way to -2, -3, -4, -5.
    assert averaged(task) == (((-1.5 - 3) / 2 - 4) / 2 - 5) / 2


class Two(nn.Module):
    """Two numbers, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.0))
        self.b = nn.Parameter(torch.tensor(0.0))


class Each:
    """The loss of each of the two is the number itself."""

    def a(self, model: Two, batch: Batch) -> torch.Tensor:
        return model.a * 1

    def b(self, model: Two, batch: Batch) -> torch.Tensor:
        return model.b * 1


def test_an_update_of_two_optimizers_is_one_sample() -> None:
    model = Two()
    task = Task(
        model=model,
        criterion=Each(),  # type: ignore[arg-type]
        optimizer={n: torch.optim.SGD([getattr(model, n)], lr=1.0) for n in ("a", "b")},
        train=Data(numbers([1, 1, 1]), 1),
        train_step="alternating",
        phases=Phases(epochs=1),
    )
    average = Average(decay=0.5)
    train(task, average=average)
    assert average.samples == task.progress.updates == 3
    # Both are -1, -2, -3: the first copied, and then twice half-way.
    expected = ((-1 - 2) / 2 - 3) / 2
    averages = task.averages["average"]
    assert {name: float(v) for name, v in averages.items()} == {"a": expected, "b": expected}


def test_a_fraction_is_one_of_all_stages() -> None:
    task = r0([1, 3], 1, phases=[Stage(name="a", epochs=1), Stage(name="b", epochs=3)])
    average = Average(kind="swa", every_updates=1, start_fraction=0.75)
    train(task, average=average)
    assert task.progress.updates == 8
    assert average.samples == 2


def test_of_a_length_in_time_there_is_no_fraction() -> None:
    task = r0([1, 3], 1, phases=Phases(time="1h"))
    with pytest.raises(ConfigError, match=r"start_fraction: of a run whose length is a time"):
        train(task, average=Average(start_fraction=0.5))


class WithBuffers(nn.Module):
    """A batch norm, and a buffer that is replaced by another tensor at each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("sum", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.sum = self.sum + x.detach().sum()
        return self.norm(x[:, None])


def with_buffers(*, test: bool = False) -> Task:
    """Batches of two: the buffer ``sum`` is 3, 10, 21."""
    model = WithBuffers()
    return Task(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        train=Data(numbers([1, 2, 3, 4, 5, 6]), 2, shuffle=False),
        test=Data(numbers([9]), 1) if test else None,
        phases=Phases(epochs=1),
    )


def test_buffers_are_copied_or_averaged_and_integers_copied() -> None:
    copied, task = Average(kind="swa", every_updates=1), with_buffers()
    moved = Average(kind="swa", every_updates=1, buffers="average", test=False)
    train(task, copied=copied, moved=moved)
    state = task.bare_model.state_dict()
    assert copied.state().keys() == state.keys()  # without the buffer that is never saved
    assert all(torch.equal(copied.state()[n], state[n]) for n in state if "running" in n)
    assert float(copied.state()["sum"]) == 21
    assert float(moved.state()["sum"]) == pytest.approx((3 + 10 + 21) / 3)
    # Means of the batches 1.5, 3.5, 5.5, with momentum .1: .15, .485, .9865.
    assert float(moved.state()["norm.running_mean"]) == pytest.approx((0.15 + 0.485 + 0.9865) / 3)
    assert int(moved.state()["norm.num_batches_tracked"]) == 3


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False)
        self.b = nn.Linear(1, 1, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x[:, None]) + self.b(x[:, None])


def test_a_shared_parameter_is_averaged_once_and_has_all_its_names(tmp_path: Path) -> None:
    model = Tied()
    task = Task(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        train=Data(numbers([1, 2]), 1),
        test=Data(numbers([1]), 1),
        phases=Phases(epochs=1),
        run=Run(str(tmp_path)),
    )
    average = Average(decay=0.5)
    train(task, average=average, save=Checkpoint())
    assert set(task.averages["average"]) == {"a.weight"}
    state = average.state()
    assert torch.equal(state["a.weight"], state["b.weight"])
    raw = store.load(newest(tmp_path), MODEL)  # made while the average was in the model
    assert all(torch.equal(raw[name], model.a.weight) for name in ("a.weight", "b.weight"))
    assert not torch.equal(state["a.weight"], model.a.weight)


def test_half_precision_is_averaged_in_float32() -> None:
    task = r0([1] * 8, 1, w=256.0)
    task.bare_model.to(torch.bfloat16)
    average = Average(decay=0.999)
    train(task, average=average)
    assert task.averages["average"]["w"].dtype == torch.float32
    # 255 and then 7 steps of a thousandth: in bfloat16 it would have stayed where it was.
    assert 254.9 < averaged(task) < 255
    task.bare_model.load_state_dict(average.state())
    assert task.bare_model.w.dtype == torch.bfloat16


# --- what a test phase sees ---


def with_tests(folder: Path | None = None, **options: Any) -> Task:
    """w = -1, -3, -6, -10, tested after every second update."""
    return r0(
        [1, 2, 3, 4],
        1,
        test=Data(numbers([1]), 1),
        phases=Phases(epochs=1, test_every_updates=2),
        run=Run(None if folder is None else str(folder)),
        **options,
    )


def in_tests() -> Any:
    """A probe of R0's weight in test phases."""
    return watch("on_forward", lambda task: None if task.train else weight(task))


def only_tests(probe: Any) -> list[float]:
    return [w for w in probe.seen if w is not None]


def test_a_test_phase_finds_the_average_and_training_the_raw_weights() -> None:
    seen, task = in_tests(), with_tests()
    parameter = task.bare_model.w
    place = parameter.data_ptr()
    starts = watch("on_backward", weight)
    train(task, average=Average(decay=0.5), seen=seen, starts=starts)
    assert only_tests(seen) == [-2, -7]
    assert starts.seen == [0, -1, -3, -6]
    assert weight(task) == -10
    assert task.bare_model.w is parameter and parameter.data_ptr() == place


def test_the_raw_weights_are_tested_on_request_and_before_the_first_sample() -> None:
    seen = in_tests()
    train(with_tests(), average=Average(decay=0.5, test=False), seen=seen)
    assert only_tests(seen) == [-3, -10]
    seen = in_tests()
    train(with_tests(), average=Average(decay=0.5, start_updates=3), seen=seen)
    assert only_tests(seen) == [-3, -10]  # the only sample is the last update


@pytest.mark.parametrize("event", ["on_forward", "on_phase_start", "on_phase_end"])
def test_an_error_in_a_test_leaves_the_raw_weights(event: str) -> None:
    def fail(task: Task) -> None:
        if not task.train:
            assert weight(task) == -2
            raise Break

    task = with_tests()
    with pytest.raises(Break):
        train(task, average=Average(decay=0.5), fails=watch(event, fail))
    assert weight(task) == -3


def test_a_stop_in_a_test_leaves_the_raw_weights_and_saves_them(tmp_path: Path) -> None:
    def stop(task: Task) -> None:
        if not task.train:
            task.request_stop("asked for by the test")

    task = with_tests(tmp_path)
    train(task, average=Average(decay=0.5), stop=watch("on_forward", stop), save=Checkpoint())
    assert weight(task) == -3
    assert float(store.load(newest(tmp_path), MODEL)["w"]) == -3
    assert float(store.load(newest(tmp_path), STATE)["averages"]["average"]["w"]) == -2


def test_raw_state_while_swapped(tmp_path: Path) -> None:
    raw = watch("on_phase_end", lambda task: float(task.raw_state()["w"]))
    train(with_tests(), average=Average(decay=0.5), raw=raw)
    assert raw.seen == [-3, -10, -10]  # in a test, at the epoch's end, in a test


def test_a_buffer_that_the_module_replaces_in_a_test_is_put_back() -> None:
    task = with_buffers(test=True)

    def replace(task: Task) -> None:
        if not task.train:
            task.bare_model.sum = torch.tensor(-1.0)

    raw = watch("on_phase_end", lambda task: float(task.raw_state()["sum"]))
    average = Average(kind="swa", every_updates=1, buffers="average")
    train(task, average=average, replace=watch("on_forward", replace), raw=raw)
    assert float(task.bare_model.sum) == 21
    assert raw.seen == [21, 21]


def test_two_hooks_cannot_both_be_tested() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.slow\.test: hooks\.fast has its average"):
        train(with_tests(), fast=Average(decay=0.5), slow=Average(decay=0.9))
    task = with_tests()
    train(task, fast=Average(decay=0.5), slow=Average(decay=0.75, test=False))
    assert averaged(task, "fast") == -7
    assert averaged(task, "slow") == ((-1 * 3 - 3) / 4 * 3 - 6) / 4 * 3 / 4 - 10 / 4


# --- from Python, and only=test ---


def test_the_state_is_one_for_load_state_dict() -> None:
    data = TensorData(r1.Samples().x, r1.Samples().y)
    task = r1.make_task(None, epochs=1, train=Data(data, 4))
    average = Average(decay=0.5)
    train(task, average=average)
    other = r1.network(seed=5)
    other.load_state_dict(average.state())
    assert all(torch.equal(p, task.averages["average"][n]) for n, p in other.named_parameters())
    average.state()["0.weight"].zero_()  # a copy: it spoils nothing
    assert float(task.averages["average"]["0.weight"].abs().sum()) > 0


def test_without_a_sample_there_is_no_state() -> None:
    average = Average(decay=0.5, start_updates=3)
    with pytest.raises(PhaseloopError, match="no sample"):
        average.state()
    train(r0([1, 2, 3, 4], 1), average=average)
    average.state()


def command(folder: str, *words: str) -> int:
    """The command line, in a process of its own."""
    from phaseloop.tools.run import run

    os.chdir(folder)
    return run(words)


def test_only_test_tests_the_average(tmp_path: Path) -> None:
    cli.folder(tmp_path)
    words = ["config=tiny", "hooks.ema={name: average, decay: 0.5}"]
    assert process.result(command, str(tmp_path), *words) == 0
    run = tmp_path / "runs" / "tiny"
    final = json.loads((run / "status.json").read_text())["final"]
    for more, is_average in (([], True), (["hooks.ema.test=false"], False)):
        test = ["only=test", "weights=newest", *words, *more]
        ended = process.run(command, str(tmp_path), *test)
        assert ended.code == 0 and ended.value == 0, ended.output
        result = json.loads((run / "test.json").read_text())
        assert ("averaged weights of hooks.ema" in ended.output) is is_average
        assert result["averaged"] is is_average
        assert (result["metrics"]["test/loss"] == final["test/loss"]) is is_average


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mean"}, r"average\.kind: 'mean' is not one of ema, swa"),
        ({"decay": 1.0}, r"average\.decay: 1\.0 is not at least 0 and less than 1"),
        ({"kind": "swa", "decay": 0.9}, r"average\.decay: belongs to kind: ema"),
        ({"kind": "swa", "warmup": True}, r"average\.warmup: belongs to kind: ema"),
        ({"every_updates": 0}, r"average\.every_updates: 0 is less than 1"),
        ({"every_updates": 1, "every_epochs": 1}, r"every_epochs: give every_updates or"),
        ({"start_updates": 1, "start_epochs": 1}, r"start_epochs: give one of start_updates, "),
        ({"start_fraction": 1.0}, r"start_fraction: 1\.0 is out of range"),
        ({"start_updates": -1}, r"start_updates: -1 is out of range"),
        ({"buffers": "keep"}, r"average\.buffers: 'keep' is not one of copy, average"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Average(**options)


def test_a_start_after_the_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start_epochs: 1 is not before the end .* has 1"):
        train(r0([1, 2], 1), average=Average(start_epochs=1))


def test_a_meter_sees_the_average() -> None:
    task = with_tests(test_meters={})
    train(task, sync=MeterSync(), average=Average(decay=0.5))
    assert task.metrics["test/loss"] == -7  # the loss on x = 1 is w
