"""Hook ``precise_bn``: which statistics a test sees, and that training never knows of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Data, DataError, Phases, Run, Sampler, Stage, Task, TensorData
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.hooks.average import Average
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.precise_bn import PreciseBN
from tests.rigs import cli, pairs, process, r1
from tests.rigs.equal import newest
from tests.rigs.probes import Break, watch
from tests.rigs.r0 import mean_output, numbers, train

XS = [1.0, 2, 3, 4, 5, 6]


class Net(nn.Module):
    """Batch norm of w * x; the dropout would shift what the norm sees if it were at work."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.w * x[:, None])) + self.w


def make(folder: Path | None = None, **options: Any) -> Task:
    """w is 1, 0, -1, -2 after 0 to 3 updates: the norm's gradient is 0, and w is added to it."""
    model = Net()
    settings: dict[str, Any] = {
        "criterion": mean_output,
        "optimizer": torch.optim.SGD([model.w], lr=1.0),
        "train": Data(numbers(XS), 2, shuffle=False),
        "test": Data(numbers([9]), 1),
        "phases": Phases(epochs=1),
        "run": Run(None if folder is None else str(folder)),
    }
    return Task(model=model, **{**settings, **options})


def in_tests() -> Any:
    """A probe of w, mean and variance in test phases."""

    def look(task: Task) -> Any:
        norm = task.bare_model.norm
        return None if task.train else (
            float(task.bare_model.w), float(norm.running_mean), float(norm.running_var)
        )  # fmt: skip

    return watch("on_forward", look)


def seen_in(probe: Any) -> list[Any]:
    return [entry for entry in probe.seen if entry is not None]


def of_population(factor: float, xs: list[float] = XS) -> tuple[float, float]:
    """Mean and variance of factor * x over all samples."""
    mean = sum(xs) / len(xs)
    square = sum(x * x for x in xs) / len(xs)
    return factor * mean, factor**2 * (square - mean**2)


@pytest.mark.parametrize("batch_size", [2, 4])
def test_a_test_sees_the_statistics_of_all_samples(batch_size: int) -> None:
    task, probe = make(train=Data(numbers(XS), batch_size, shuffle=False)), in_tests()
    train(task, precise=PreciseBN(batches=-(-len(XS) // batch_size)), probe=probe)
    ((w, mean, variance),) = seen_in(probe)
    expected = of_population(w)
    assert w == 1 - task.progress.updates
    assert (mean, variance) == pytest.approx(expected, rel=1e-5)


def test_the_weights_are_those_that_are_tested() -> None:
    task, probe = make(), in_tests()
    train(task, average=Average(decay=0.75), precise=PreciseBN(batches=3), probe=probe)
    ((w, mean, variance),) = seen_in(probe)
    assert w == pytest.approx((0 * 3 - 1) / 4 * 3 / 4 - 2 / 4)
    assert (mean, variance) == pytest.approx(of_population(w), rel=1e-5)


def test_more_batches_than_an_epoch_has_go_on_in_the_next() -> None:
    task, probe = make(), in_tests()
    train(task, precise=PreciseBN(batches=4), probe=probe)
    ((w, mean, _),) = seen_in(probe)
    assert mean == pytest.approx(of_population(w, [*XS, 1.0, 2])[0])


def test_a_stage_measures_over_its_own_data() -> None:
    ys = [2.0, 4, 8, 16]
    stages = [
        Stage(name="first", epochs=1),
        Stage(name="second", epochs=1, train=Data(numbers(ys), 2, shuffle=False)),
    ]
    task, probe = make(phases=stages), in_tests()
    train(task, precise=PreciseBN(batches=2), probe=probe)
    (w, mean, _), (v, other, _) = seen_in(probe)
    assert mean == pytest.approx(of_population(w, XS[:4])[0])
    assert other == pytest.approx(of_population(v, ys)[0], rel=1e-5)


def test_only_every_n_epochs_and_after_the_last() -> None:
    task, probe = make(phases=Phases(epochs=3)), in_tests()
    raw = watch("on_phase_end", lambda task: float(task.raw_state()["norm.running_mean"]))
    train(task, precise=PreciseBN(batches=3, every_epochs=2), probe=probe, raw=raw)
    measured = [mean == pytest.approx(of_population(w)[0]) for w, mean, _ in seen_in(probe)]
    assert measured == [False, True, True]
    assert seen_in(probe)[0][1] == raw.seen[1]


def test_several_test_sets_measure_once() -> None:
    sets = {"a": Data(numbers([9]), 1), "b": Data(numbers([8]), 1)}
    task, probe = make(test=sets), in_tests()
    hook = PreciseBN(batches=3)
    calls = []
    measure = hook._measure
    hook._measure = lambda task: calls.append(1) or measure(task)  # type: ignore[method-assign]
    train(task, precise=hook, probe=probe)
    assert len(calls) == 1
    first, second = seen_in(probe)
    assert first == second


def test_what_the_training_has_opened_is_not_opened_again() -> None:
    made: list[int] = []
    asked: list[int] = []

    def dataset(epoch: int) -> Any:
        made.append(epoch)
        return numbers([x + epoch for x in XS])

    def labels(dataset: Any) -> list[int]:
        asked.append(len(made))
        return [0] * len(dataset)

    sampler = Sampler("balanced", by=labels)
    task = make(train=Data(dataset, 2, rebuild_every=2, sampler=sampler), phases=Phases(epochs=4))
    probe = in_tests()
    train(task, precise_bn=PreciseBN(batches=3), probe=probe)
    assert made == [1, 3] and asked == [1, 2]  # of four tests
    for (w, mean, var), epoch in zip(seen_in(probe), (1, 1, 3, 3), strict=True):
        assert (mean, var) == pytest.approx(of_population(w, [x + epoch for x in XS]))


def test_measuring_may_go_on_in_a_dataset_that_training_has_not_reached() -> None:
    """It is made for that alone: the training goes on with its own, and makes its own later."""
    task = make(
        train=Data(lambda epoch: numbers([x + epoch for x in XS]), 6, rebuild_every=1),
        phases=Phases(epochs=2),
    )
    probe, inputs = (
        in_tests(),
        watch("on_forward", lambda task: task.train and sum(task.batch.input)),
    )
    train(task, precise_bn=PreciseBN(batches=2), probe=probe, inputs=inputs)
    w, mean, _ = seen_in(probe)[0]
    assert mean == pytest.approx(w * (sum(XS) / 6 + 1.5))  # of epochs 1 and 2
    assert [float(s) for s in inputs.seen if s is not False] == [sum(XS) + 6, sum(XS) + 12]


def state(task: Task) -> dict[str, Any]:
    norm = task.bare_model.norm
    return {
        "flags": [module.training for module in task.bare_model.modules()],
        "momentum": norm.momentum,
        "hooks": len(norm._forward_pre_hooks),
        "buffers": {name: id(buffer) for name, buffer in norm.named_buffers()},
    }


def test_everything_is_put_back(tmp_path: Path) -> None:
    plain, task = make(), make(tmp_path)
    before = state(task)
    train(plain)
    train(task, precise=PreciseBN(batches=3), save=Checkpoint())
    assert state(task) == before
    saved = store.load(newest(tmp_path), MODEL)
    for name, value in plain.bare_model.state_dict().items():
        assert torch.equal(task.bare_model.state_dict()[name], value), name
        assert torch.equal(saved[name], value), name


def test_everything_is_put_back_after_an_error() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and self.norm.training:
                super().forward(x)
                raise Break
            return super().forward(x)

    model = Fails()
    task = Task(
        model=model, criterion=mean_output, optimizer=torch.optim.SGD([model.w], lr=1.0),
        train=Data(numbers(XS), 2), test=Data(numbers([9]), 1), phases=Phases(epochs=1),
    )  # fmt: skip
    before, raw = state(task), {}

    def note(task: Task) -> None:
        raw.update({n: v.clone() for n, v in task.raw_state().items()})

    with pytest.raises(Break):
        train(task, precise=PreciseBN(batches=3), note=watch("on_phase_end", note))
    assert state(task) == before
    assert all(torch.equal(v, raw[n]) for n, v in model.state_dict().items())


def test_a_signal_ends_the_measuring_and_the_state_is_saved(tmp_path: Path) -> None:
    class Kills(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and self.norm.training:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x)

    model = Kills()
    task = Task(
        model=model, criterion=mean_output, optimizer=torch.optim.SGD([model.w], lr=1.0),
        train=Data(numbers(XS), 2), test=Data(numbers([9]), 1), phases=Phases(epochs=1),
        run=Run(str(tmp_path)),
    )  # fmt: skip
    probe = in_tests()
    outcome = train(task, precise=PreciseBN(batches=10**6), save=Checkpoint(), probe=probe)
    assert outcome.signal == signal.SIGTERM
    assert seen_in(probe) == []
    saved = store.load(newest(tmp_path), MODEL)
    assert all(torch.equal(v, saved[n]) for n, v in model.state_dict().items())


def drawing(folder: Path, hook: bool, workers: int) -> dict[str, Any]:
    """R1 with a batch norm, augmentation and tests in mid-epoch; what the training was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
    task = r1.make_task(folder, model=model, epochs=2, augment=True, test=True, workers=workers,
                        phases={"test_every_updates": 3})  # fmt: skip
    more = {"precise": PreciseBN(batches=5)} if hook else {}
    ids = watch("on_step", lambda task: (task.batch.indices.tolist(), float(task.loss)))
    draws = watch("on_step", lambda task: r1.draws() if task.train else None)
    train(task, **r1.make_hooks(), **more, ids=ids, draws=draws)
    training = [entry for entry, drawn in zip(ids.seen, draws.seen, strict=True) if drawn]
    return {"training": training, "draws": [d for d in draws.seen if d],
            "test": task.metrics["test/loss"],
            "model": {n: v.tolist() for n, v in model.state_dict().items()}}  # fmt: skip


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_data_d_the_training_is_the_same_with_and_without(tmp_path: Path, workers: int) -> None:
    plain = drawing(tmp_path / "plain", False, workers)
    precise = drawing(tmp_path / "precise", True, workers)
    assert plain.pop("test") != precise.pop("test")
    assert plain == precise


def test_frozen_norms_keep_their_statistics() -> None:
    task, probe = make(freeze=["norm"]), in_tests()
    train(task, precise=PreciseBN(batches=3), probe=probe)
    assert [entry[1:] for entry in seen_in(probe)] == [(0, 1)]  # as they were made


def test_only_test_measures_too(tmp_path: Path) -> None:
    cli.folder(tmp_path)
    words = ["config=tiny", "hooks.precise_bn.batches=4",
             "model={_target_: torch.nn.BatchNorm1d, num_features: 4}"]  # fmt: skip
    assert process.result(command, str(tmp_path), *words) == 0
    run = tmp_path / "runs" / "tiny"
    final = json.loads((run / "status.json").read_text())["final"]
    for more, same in (([], True), (["hooks.precise_bn=null"], False)):
        ended = process.run(command, str(tmp_path), "only=test", "weights=newest", *words, *more)
        assert ended.value == 0, ended.output
        metrics = json.loads((run / "test.json").read_text())["metrics"]
        # Measured over the same samples in the same order: the same to the bit.
        assert (metrics["test/loss"] == final["test/loss"]) is same


def command(folder: str, *words: str) -> int:
    """The command line, in a process of its own."""
    from phaseloop.tools.run import run

    os.chdir(folder)
    return run(words)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precise_bn\.batches: 0 is less than 1"):
        PreciseBN(batches=0)
    with pytest.raises(ConfigError, match=r"precise_bn\.every_epochs: 0 is less than 1"):
        PreciseBN(every_epochs=0)
    with pytest.raises(ConfigError, match=r"hooks\.bn: the model has no batch norm"):
        train(r1.make_task(None), bn=PreciseBN())
    with pytest.raises(ConfigError, match=r"hooks\.bn: it needs training data"):
        train(make(train=None), bn=PreciseBN())
    with pytest.raises(ConfigError, match=r"one input, and data\.train\.views is 2"):
        pairs = Data(numbers(XS), 2, views=2)
        train(make(train=pairs, train_step=lambda task: None), bn=PreciseBN())


def nothing(samples: list[Any]) -> None:
    return None


def test_data_that_gives_nothing_is_an_error_and_no_endless_loop() -> None:
    task = make(train=Data(r1.Samples(), 4, collate=nothing))
    with pytest.raises(DataError, match=r"hooks\.bn: epoch 1 has no batch"):
        train(task, bn=PreciseBN())


# --- several processes ---

ROWS = 11
"""In batches of 4 the last has three samples; in batches of 5 one, so that a process has none."""


class Two(nn.Module):
    """A batch norm of the input, and one of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.second = nn.BatchNorm2d(1)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.second(x[:, :1, :, None])
        return self.head(self.first(x).mean(2)) + maps.sum((1, 2, 3))[:, None]


def statistics(batch_size: int, batches: int, together: bool = False) -> dict[str, Tensor]:
    """Those that the first test sees, of data whose values lie far from 0.

    Args:
        together: processes go through the model as often as each other.
    """
    backend = pairs.ddp()
    backend.collective_forward = together  # type: ignore[misc]
    torch.manual_seed(0)
    model = Two().double()
    x = torch.randn(ROWS, 3, 2, dtype=torch.float64) + 10
    task = Task(
        model=model, criterion=mean_output, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(x), batch_size, shuffle=False), test=Data(TensorData(x), 4),
        phases=Phases(epochs=1), precision="float64", backend=backend,
    )  # fmt: skip
    seen: list[dict[str, Tensor]] = []

    def look(task: Task) -> None:
        if not task.train:
            seen.append({k: v.clone() for k, v in task.bare_model.named_buffers()})

    pairs.train(task, precise=PreciseBN(batches), look=watch("on_phase_start", look))
    return seen[0]


CASES = {
    "unequal": {"batch_size": 4, "batches": 3},
    "a process with none": {"batch_size": 5, "batches": 3},
    "together": {"batch_size": 5, "batches": 3, "together": True},
}
_found: dict[str, list[Any]] = {}


@pytest.mark.parametrize("name", CASES)
def test_over_two_processes_as_over_one(name: str) -> None:
    if not _found:
        cases: list[pairs.Case] = [(statistics, options) for options in CASES.values()]
        _found.update(zip(CASES, pairs.results(cases), strict=True))
    first, second = _found[name]
    assert not isinstance(first, pairs.Failed), first
    for key, value in statistics(**CASES[name]).items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(first[key], value, rtol=0, atol=1e-10)
            assert torch.equal(first[key], second[key])
