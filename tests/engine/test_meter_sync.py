"""Meters over processes: what several measured is what one would have, however they shared it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper

from phaseloop import Accuracy, Mean
from phaseloop.engine.backends import Backend, Ddp
from phaseloop.engine.errors import CheckpointError, ConfigError, PhaseloopError
from phaseloop.engine.meter_set import MeterSet
from tests.rigs import equal, ranks

CLASSES = 5
BATCHES = 7


class Counting(Ddp):
    """Several processes on the CPU; writes down the messages they send."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.messages: list[str] = []
        self.setup()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.messages.append(f"sum {tensor.dtype}".replace("torch.", ""))
        return super().all_reduce(tensor)

    def gather_with_grad(self, tensor: Tensor) -> Tensor:
        self.messages.append(f"gather {tensor.dtype}".replace("torch.", ""))
        return super().gather_with_grad(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        self.messages.append("tell")
        return super().all_gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        self.messages.append("hear")
        return super().broadcast_object(value)


# --- meters of every kind ---


class Histogram:
    """A user's meter: plain counts in float32 on the host, and the largest count's class."""

    higher_is_better = None

    def __init__(self) -> None:
        self.counts = torch.zeros(CLASSES)
        self.seen = torch.zeros((), dtype=torch.int32)

    def update(self, output: Any, target: Any) -> None:
        self.counts += torch.bincount(target, minlength=CLASSES)
        self.seen += len(target)

    def compute(self) -> Any:
        return {"most": float(self.counts.max()), "seen": float(self.seen)}

    def reset(self) -> None:
        self.counts.zero_()
        self.seen.zero_()

    def to(self, device: torch.device) -> Any:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.seen = state["counts"], state["seen"]

    def summed(self) -> list[Tensor]:
        return [self.counts, self.seen]


class Theirs(torchmetrics.Metric):
    """A metric of torchmetrics with one state; ``how`` is its reduction."""

    full_state_update = False

    def __init__(self, how: Any, default: Any) -> None:
        super().__init__()
        self.add_state("state", default, dist_reduce_fx=how)


class Kept(Theirs):
    """Keeps pairs of a tensor and a name, one by one: nothing that could be concatenated."""

    def __init__(self) -> None:
        super().__init__(None, [])
        self.add_state("names", [], dist_reduce_fx=None)

    def update(self, output: Tensor, target: Tensor) -> None:
        for row, label in zip(output, target, strict=True):
            self.state.append(row[: 1 + int(label)])  # of any length
            self.names.append(("class", int(label)))

    def compute(self) -> Any:
        largest = [float(row.max()) for row in self.state]
        assert all(
            len(row) == 1 + label for row, (_, label) in zip(self.state, self.names, strict=True)
        )
        return {"sum": math.fsum(largest), "count": float(len(self.names))}


class MeanOfProcesses(Theirs):
    """Has the mean over processes of the number of samples."""

    def __init__(self) -> None:
        super().__init__("mean", torch.tensor(0.0))

    def update(self, output: Tensor, target: Tensor) -> None:
        self.state += len(target)

    def compute(self) -> Tensor:
        return self.state


def product(stacked: Tensor) -> Tensor:
    return stacked.prod(dim=0)


class Product(Theirs):
    """A reduction of the user's own."""

    def __init__(self) -> None:
        super().__init__(product, torch.tensor(1.0, dtype=torch.float64))

    def update(self, output: Tensor, target: Tensor) -> None:
        self.state *= 1 + len(target)

    def compute(self) -> Tensor:
        return self.state


class OwnSync(Theirs):
    """A sync of the user's own: the state is the largest number of samples of a process."""

    def __init__(self) -> None:
        super().__init__("sum", torch.tensor(0.0))

    def update(self, output: Tensor, target: Tensor) -> None:
        self.state += len(target)

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        self.state = torch.stack(dist_sync_fn(self.state, group=process_group)).amax(0)

    def compute(self) -> Tensor:
        return self.state


class OfFirst(torchmetrics.Metric):
    """Another metric, of the first column of the output."""

    full_state_update = False

    def __init__(self, metric: Any, two: bool = False) -> None:
        super().__init__()
        self.metric = metric
        self.two = two

    def update(self, output: Tensor, target: Tensor) -> None:
        self.metric.update(*((output[:, 0], output[:, 1]) if self.two else (output[:, 0],)))

    def compute(self) -> Any:
        value = self.metric.compute()
        return value.double().sort().values.sum() if value.numel() > 1 else value

    def reset(self) -> None:
        super().reset()
        self.metric.reset()


# What one process would have, whoever saw what.
SAME: dict[str, Callable[[], Any]] = {
    "hits": lambda: Accuracy(2),
    "histogram": Histogram,
    "accuracy": lambda: MulticlassAccuracy(CLASSES, average="micro"),
    "auroc": lambda: MulticlassAUROC(CLASSES),
    "auroc_binned": lambda: MulticlassAUROC(CLASSES, thresholds=11),
    "collection": lambda: MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES),
            "f1": MulticlassF1Score(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),
        }
    ),
    "classes": lambda: ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
    "on_the_host": lambda: MulticlassAUROC(CLASSES, compute_on_cpu=True),
    "largest": lambda: OfFirst(torchmetrics.MaxMetric()),
    "smallest": lambda: OfFirst(torchmetrics.MinMetric()),
    "all": lambda: OfFirst(torchmetrics.CatMetric()),
    "correlation": lambda: OfFirst(torchmetrics.PearsonCorrCoef(), two=True),
    "kept": Kept,
}
# Those whose value says how the processes shared the samples.
OTHER: dict[str, Callable[[], Any]] = {
    "mean_of_processes": MeanOfProcesses,
    "product": Product,
    "own_sync": OwnSync,
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Outputs and targets in batches of 1 to 7 samples; every class is there."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, CLASSES, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in range(1, BATCHES + 1)
    ]


def meter_set(kinds: Mapping[str, Callable[[], Any]]) -> MeterSet:
    return MeterSet("test", {name: make() for name, make in kinds.items()})


def feed(meters: MeterSet, numbers: Sequence[int]) -> None:
    """Take in these batches; parts of the loss have the name of the batch's parity."""
    for number in numbers:
        output, target = batches()[number]
        loss = output.double().mean()
        meters.update(loss, len(target), output, target)
        meters.add_parts({("even", "odd")[number % 2]: loss}, len(target))


def expected(numbers: Sequence[int], kinds: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """What one process has of these batches."""
    meters = meter_set(kinds)
    feed(meters, numbers)
    return meters.compute()


# Which batches each of two processes sees. The last: neither sees any.
SHARES: list[list[list[int]]] = [
    [[0, 2, 4, 6], [1, 3, 5]],  # and neither has all parts of the loss
    [[0, 1, 2, 3, 4, 5, 6], []],
    [[], [0, 1, 2, 3, 4, 5, 6]],
    [[5], [6]],
]


def over_two(shares: list[list[list[int]]]) -> list[Any]:
    """On each of two processes: the values of each way to share, twice."""
    backend = Counting()
    found = []
    for share in shares:
        meters = meter_set(SAME)
        feed(meters, share[backend.rank])
        before = copy.deepcopy(meters.state_dict())
        values = meters.compute(backend)
        assert not list(equal.differ("state", before, meters.state_dict()))
        assert meters.compute(backend) == values
        found.append(values)
    return found


def test_what_two_measure_is_what_one_would_have_and_they_agree() -> None:
    first, second = ranks.results(over_two, SHARES)
    assert first == second
    for share, values in zip(SHARES, first, strict=True):
        one = expected(share[0] + share[1], SAME)
        assert set(values) == set(one)
        assert values == pytest.approx(one, abs=1e-6, nan_ok=True)
        for exact in ("hits", "histogram/seen", "histogram/most", "auroc", "largest", "smallest",
                      "on_the_host", "kept/count"):  # fmt: skip
            assert values[f"test/{exact}"] == one[f"test/{exact}"], exact
    assert {"test/loss/even", "test/loss/odd"} < set(first[0])


def nobody() -> Any:
    backend = Counting()
    return meter_set({k: SAME[k] for k in ("hits", "accuracy")}).compute(backend)


def test_where_nobody_saw_anything_nothing_hangs() -> None:
    for values in ranks.results(nobody, processes=3):
        assert math.isnan(values["test/hits"])
        assert values["test/accuracy"] == 0.0  # torchmetrics' value of nothing


def others() -> Any:
    backend = Counting()
    found = []
    for share in ([0], [3], [5]), ([], [3], [5]):
        meters = meter_set(OTHER)
        feed(meters, share[backend.rank])
        found.append(meters.compute(backend))
    return found


def test_reductions_of_every_other_kind() -> None:
    # Batch n has n + 1 samples: 1, 4 and 6; a process that saw nothing is no part of a mean.
    for values in ranks.results(others, processes=3):
        both, two = values
        assert both["test/mean_of_processes"] == pytest.approx((1 + 4 + 6) / 3)
        assert two["test/mean_of_processes"] == pytest.approx((4 + 6) / 2)
        assert both["test/product"] == (1 + 1) * (1 + 4) * (1 + 6)
        assert two["test/product"] == (1 + 4) * (1 + 6)
        assert both["test/own_sync"] == two["test/own_sync"] == 6


def goes_on() -> Any:
    """A phase that is read in its middle goes on from its own state."""
    backend = Counting()
    meters = meter_set(SAME)
    feed(meters, [0, 2] if backend.rank == 0 else [1])
    meters.compute(backend)
    feed(meters, [3] if backend.rank == 0 else [4, 5])
    return meters.compute(backend)


def test_a_phase_goes_on_after_it_was_read() -> None:
    first, second = ranks.results(goes_on)
    assert first == second
    assert first == pytest.approx(expected([0, 1, 2, 3, 4, 5], SAME), abs=1e-6)


def messages() -> Any:
    backend = Counting()
    many = {f"{name}{i}": make for i in range(3) for name, make in SAME.items()}
    meters = meter_set(many)
    feed(meters, [backend.rank])
    meters.compute(backend)
    return backend.messages


def test_the_number_of_messages_does_not_grow_with_the_meters() -> None:
    # One to tell what there is; a sum for float64 (losses), int64 (hits), float32 and int32
    # (histograms); the states of all that is torchmetrics'; one to hear the primary's values.
    for sent in ranks.results(messages):
        assert sent[0] == "tell" and sent[-1] == "hear"
        assert sorted(sent[1:-1]) == ["gather uint8", "sum float32", "sum float64", "sum int32",
                                      "sum int64"]  # fmt: skip


def other_shapes() -> str:
    backend = Counting()
    meter = Histogram()
    meter.counts = torch.zeros(CLASSES + backend.rank)
    with pytest.raises(ConfigError) as failed:
        MeterSet("test", {"histogram": meter}).compute(backend)
    return str(failed.value)


def test_sums_of_other_shapes_are_an_error_on_all() -> None:
    for message in ranks.results(other_shapes):
        assert "meters.histogram" in message and "[5]" in message and "[6]" in message


# --- on another number of processes ---


def states(
    kinds: Mapping[str, Callable[[], Any]], shares: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """The states of several processes, as a checkpoint has them."""
    found = []
    for share in shares:
        meters = meter_set(kinds)
        feed(meters, share)
        found.append(copy.deepcopy(meters.state_dict()))
    return found


UNMERGEABLE = {"mean_of_processes", "product", "correlation"}
MERGED = {name: make for name, make in SAME.items() if name not in UNMERGEABLE}


@pytest.mark.filterwarnings("ignore:No positive samples")
@pytest.mark.parametrize(
    "shares", [[[0, 2], [1]], [[], [0, 1, 2]], [[0, 1, 2], []], [[0], [1], [2]]]
)
def test_one_goes_on_from_what_several_had_measured(shares: list[list[int]]) -> None:
    given = states(MERGED, shares)
    kept = copy.deepcopy(given)
    meters = meter_set(MERGED)
    feed(meters, [6])  # forgotten
    meters.load_merged(given)
    assert meters.compute() == pytest.approx(expected([0, 1, 2], MERGED), abs=1e-6)
    feed(meters, [3, 4])
    assert meters.compute() == pytest.approx(expected([0, 1, 2, 3, 4], MERGED), abs=1e-6)
    assert not list(equal.differ("given", kept, given))


@pytest.mark.parametrize("name", sorted(UNMERGEABLE))
def test_what_cannot_be_put_together_in_mid_phase_is_refused(name: str) -> None:
    make = {**SAME, **OTHER}[name]
    with pytest.raises(CheckpointError, match=rf"meters\.{name}: .*state"):
        meter_set({name: make}).load_merged(states({name: make}, [[3], [5]]))


@pytest.mark.parametrize("name", sorted(UNMERGEABLE))
def test_but_taken_where_one_process_alone_saw_something(name: str) -> None:
    make = {**SAME, **OTHER}[name]
    meters = meter_set({name: make})
    meters.load_merged(states({name: make}, [[], [5]]))
    feed(meters, [6])
    assert meters.compute() == pytest.approx(expected([5, 6], {name: make}), abs=1e-6)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_a_meter_that_no_state_knows_starts_clean() -> None:
    meters = meter_set({"hits": SAME["hits"], "new": SAME["accuracy"]})
    feed(meters, [0])
    meters.load_merged(states({"hits": SAME["hits"]}, [[1], [2]]))
    assert meters.meters["new"].state_dict()["updates"] == [0]
    assert meters.compute()["test/hits"] == expected([1, 2], {"hits": SAME["hits"]})["test/hits"]


class _Failed(Backend):
    def all_gather_object(self, value: Any) -> list[Any]:
        raise PhaseloopError("this process has failed")


def test_one_process_asks_nobody() -> None:
    meters = MeterSet("test", {"mean": Mean()})
    assert math.isnan(meters.compute(_Failed())["test/mean"])
