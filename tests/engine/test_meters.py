"""Meters: the built-in ones against torchmetrics, and torchmetrics' own, over interruptions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from phaseloop import Accuracy, ConfigError, Mean, Meter
from phaseloop.engine.meter_set import MeterSet
from phaseloop.engine.torch_metric import TorchMetric

CLASSES = 5


def batches(count: int = 7, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Outputs and targets in batches of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, CLASSES, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in range(1, count + 1)
    ]


@pytest.mark.parametrize("top_k", [1, 2, 3, CLASSES])
def test_accuracy_is_that_of_torchmetrics(top_k: int) -> None:
    ours = Accuracy(top_k)
    theirs = MulticlassAccuracy(CLASSES, top_k=top_k, average="micro")
    for output, target in batches():
        ours.update(output, target)
        theirs.update(output, target)
        assert float(ours.compute()) == pytest.approx(float(theirs.compute()), abs=1e-7)
    hits = sum(
        int((output.topk(top_k).indices == target[:, None]).sum()) for output, target in batches()
    )
    count = sum(len(target) for _, target in batches())
    assert float(ours.compute()) == hits / count


def test_mean_is_that_of_torchmetrics() -> None:
    ours, theirs = Mean(), torchmetrics.MeanMetric()
    for output, _ in batches():
        ours.update(output[:, 0], None)
        theirs.update(output[:, 0])
    assert float(ours.compute()) == pytest.approx(float(theirs.compute()), abs=1e-6)


def test_a_mean_of_means_weighs_by_the_samples() -> None:
    mean = Mean()
    mean.add(torch.tensor(1.0), 4)
    mean.add(torch.tensor(2.5), 2)
    assert float(mean.compute()) == 1.5


@pytest.mark.parametrize("make", [Mean, Accuracy])
def test_before_any_sample_the_value_is_nan(make: Callable[[], Any]) -> None:
    meter = make()
    assert math.isnan(float(meter.compute()))
    meter.update(*batches()[3]) if make is Accuracy else meter.update(torch.ones(3), None)
    assert math.isfinite(float(meter.compute()))
    meter.reset()
    assert math.isnan(float(meter.compute()))


def test_counts_and_sums_have_room_for_large_numbers() -> None:
    mean = Mean()
    mean.add(torch.tensor(1.0), 2**24)
    mean.add(torch.tensor(1.0), 1)
    assert float(mean.state_dict()["weight"]) == 2**24 + 1
    accuracy = Accuracy()
    accuracy.update(torch.eye(2, dtype=torch.bfloat16).repeat(500, 1), torch.arange(2).repeat(500))
    assert float(accuracy.compute()) == 1.0
    assert all(tensor.dtype == torch.int64 for tensor in accuracy.summed())


def test_outputs_with_a_graph_are_taken_without_it() -> None:
    for meter in (Mean(), Accuracy()):
        output = torch.randn(4, CLASSES, requires_grad=True)
        target = torch.zeros(4, dtype=torch.long)
        meter.update(output.sum(1) if isinstance(meter, Mean) else output, target)
        assert not any(tensor.requires_grad for tensor in meter.summed())


def test_the_built_in_ones_are_meters_and_know_their_direction() -> None:
    assert isinstance(Mean(), Meter)
    assert isinstance(Accuracy(), Meter)
    assert (Mean().higher_is_better, Accuracy().higher_is_better) == (False, True)
    with pytest.raises(ConfigError, match="less than 1"):
        Accuracy(0)


# --- torchmetrics ---

THEIRS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: MulticlassAccuracy(CLASSES),
    "f1": lambda: MulticlassF1Score(CLASSES),
    "auroc": lambda: MulticlassAUROC(CLASSES),  # keeps a list of all outputs
    "auroc_binned": lambda: MulticlassAUROC(CLASSES, thresholds=11),
    "collection": lambda: MetricCollection(
        {"accuracy": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
    ),
    "collection_of_lists": lambda: MetricCollection([MulticlassAUROC(CLASSES)]),
}


def value_of(meter: Any) -> Any:
    value = meter.compute()
    return {k: float(v) for k, v in value.items()} if isinstance(value, dict) else float(value)


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_metric_of_torchmetrics_is_a_meter(name: str) -> None:
    meters = MeterSet("test", {"theirs": THEIRS[name]()})
    plain = THEIRS[name]()
    for output, target in batches():
        meters.update(None, len(target), output, target)
        plain.update(output, target)
    expected = value_of(plain)
    found = {k: v for k, v in meters.compute().items() if k.startswith("test/theirs")}
    if isinstance(expected, dict):
        assert found == {f"test/theirs/{key}": value for key, value in expected.items()}
    else:
        assert found == {"test/theirs": expected}


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("name", sorted(THEIRS))
def test_its_state_survives_a_round_trip_in_mid_phase(name: str, after: int, tmp_path: Any) -> None:
    whole, first = TorchMetric(THEIRS[name]()), TorchMetric(THEIRS[name]())
    for output, target in batches():
        whole.update(output, target)
    for output, target in batches()[:after]:
        first.update(output, target)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = TorchMetric(THEIRS[name]())
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for output, target in batches()[after:]:
        second.update(output, target)
    assert value_of(second) == value_of(whole)


def test_a_restored_metric_knows_that_it_was_updated(recwarn: pytest.WarningsRecorder) -> None:
    """Else torchmetrics warns that it computes before any update."""
    meter, again = (TorchMetric(MulticlassAccuracy(CLASSES)) for _ in range(2))
    meter.update(*batches()[6])
    again.load_state_dict(meter.state_dict())
    assert value_of(again) == value_of(meter)
    assert not [w for w in recwarn if "before the ``update``" in str(w.message)]


# torchmetrics warns where a class has no sample, and where nothing was measured: as meant here.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_state_is_of_its_moment(name: str) -> None:
    """What is saved must not go on with the meter, nor the meter with what is saved."""
    meter = TorchMetric(THEIRS[name]())
    for output, target in batches()[:3]:
        meter.update(output, target)
    then = copy.deepcopy(value_of(meter))
    state = meter.state_dict()
    for output, target in batches()[3:]:
        meter.update(output, target)
    assert value_of(meter) != then
    for _ in range(2):
        again = TorchMetric(THEIRS[name]())
        again.load_state_dict(state)
        assert value_of(again) == then
        again.update(*batches()[6])


# torchmetrics warns where a class has no sample: as meant here.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(THEIRS))
def test_what_is_put_aside_comes_back_as_often_as_it_is_asked_for(name: str) -> None:
    meters = MeterSet("test", {"theirs": THEIRS[name](), "ours": Accuracy()})
    whole = MeterSet("test", {"theirs": THEIRS[name](), "ours": Accuracy()})

    def update(meters: MeterSet, output: Tensor, target: Tensor) -> None:
        loss = output.mean().detach()
        meters.add_parts({"part": loss}, 1.0)
        meters.update(loss, len(target), output, target)

    for batch in batches():
        kept = meters.put_aside()
        for other in (batches(seed=1)[3], batches(seed=2)[4]):
            update(meters, *other)
            meters.put_back(kept)
        update(meters, *batch)
        update(whole, *batch)
    assert meters.compute() == whole.compute()


def test_a_metric_that_keeps_every_sample_is_not_copied_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meters = MeterSet("test", {"curve": MulticlassAUROC(CLASSES)})
    cloned: list[int] = []
    clone, deepcopy = Tensor.clone, Tensor.__deepcopy__
    monkeypatch.setattr(Tensor, "clone", lambda t: cloned.append(t.numel()) or clone(t))
    monkeypatch.setattr(Tensor, "__deepcopy__", lambda t, m: cloned.append(9) or deepcopy(t, m))
    for batch in batches():
        meters.update(None, 1.0, *batch)
        meters.put_aside()
    assert len(cloned) == 2 * len(batches()) and set(cloned) == {1}  # sum and weight of the loss


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_value_computed_before_loading_is_not_kept(name: str) -> None:
    meter, other = TorchMetric(THEIRS[name]()), TorchMetric(THEIRS[name]())
    meter.update(*batches()[5])
    value_of(meter)
    for output, target in batches(seed=1):
        other.update(output, target)
    meter.load_state_dict(other.state_dict())
    assert value_of(meter) == value_of(other)


def test_outputs_in_a_tree_are_detached() -> None:
    class Keeps(torchmetrics.Metric):
        higher_is_better = None

        def __init__(self) -> None:
            super().__init__()
            self.add_state("kept", [])

        def update(self, output: Any, target: Any) -> None:
            self.kept.append(output["a"][0])

        def compute(self) -> float:
            return float(len(self.kept))

    meter = TorchMetric(Keeps())
    meter.update({"a": (torch.ones(1, requires_grad=True) * 2,)}, None)
    assert meter.metric.kept[0].grad_fn is None


def test_several_values_at_once_are_refused_by_name() -> None:
    meters = MeterSet("test", {"each": MulticlassAccuracy(CLASSES, average="none")})
    output, target = batches()[5]
    meters.update(None, 1, output, target)
    with pytest.raises(ConfigError, match="5 values at once") as error:
        meters.compute()
    assert error.value.key == "meters.each"


def test_its_direction_is_known_or_not() -> None:
    meters = MeterSet(
        "test",
        {
            "accuracy": MulticlassAccuracy(CLASSES),
            "error": torchmetrics.MeanSquaredError(),
            "mean": torchmetrics.MeanMetric(),
            "both": MetricCollection(
                {"accuracy": MulticlassAccuracy(CLASSES), "error": torchmetrics.MeanSquaredError()}
            ),
        },
    )
    assert meters.direction("test/accuracy") is True
    assert meters.direction("test/error") is False
    assert meters.direction("test/mean") is None
    assert meters.direction("test/both/accuracy") is True
    assert meters.direction("test/both/error") is False
    assert meters.direction("test/loss") is False
    assert meters.direction("test/nothing") is None


# --- sets ---


def test_a_set_reports_by_phase_and_name() -> None:
    meters = MeterSet("test", {"accuracy": Accuracy()})
    output, target = batches()[4]
    meters.update(torch.tensor(2.0), 5, output, target)
    meters.add_parts({"box": torch.tensor(1.5)}, 5)
    assert meters.compute() == {
        "test/loss": 2.0,
        "test/loss/box": 1.5,
        "test/accuracy": float((output.argmax(1) == target).sum()) / 5,
    }
    assert meters.direction("test/loss/box") is False


def test_outputs_may_be_measured_without_a_loss() -> None:
    meters = MeterSet("test", {"accuracy": Accuracy()})
    output, target = batches()[4]
    meters.update(None, 5, output, target)
    assert meters.compute() == {"test/accuracy": float((output.argmax(1) == target).sum()) / 5}
    nothing = MeterSet("test")
    nothing.update(None, 5, output, target)
    assert nothing.compute() == {}
    nothing.reset()
    assert math.isnan(nothing.compute()["test/loss"])  # nothing was measured at all


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_reset_set_is_as_new() -> None:
    meters = MeterSet("test", {"accuracy": Accuracy(), "theirs": MulticlassAccuracy(CLASSES)})
    fresh = copy.deepcopy(meters.state_dict())
    output, target = batches()[4]
    meters.update(torch.tensor(2.0), 5, output, target)
    meters.add_parts({"box": torch.tensor(1.5)}, 5)
    meters.reset()
    assert meters.compute().keys() == {"test/accuracy", "test/theirs"}  # no loss was measured
    assert str(meters.state_dict()) == str(fresh)


def test_a_set_survives_a_round_trip_with_the_parts_of_the_loss() -> None:
    meters, again = (MeterSet("test", {"accuracy": Accuracy()}) for _ in range(2))
    output, target = batches()[4]
    meters.update(torch.tensor(2.0), 5, output, target)
    meters.add_parts({"box": torch.tensor(1.5)}, 5)
    state = copy.deepcopy(meters.state_dict())
    again.add_parts({"stale": torch.tensor(9.0)}, 1)
    again.load_state_dict(state)
    assert again.compute() == meters.compute()
    for each in (meters, again):
        each.update(torch.tensor(4.0), 5, output, target)
        each.add_parts({"box": torch.tensor(2.5)}, 5)
    assert again.compute() == meters.compute()
    assert again.compute()["test/loss"] == 3.0


def test_a_meter_that_the_checkpoint_does_not_know_starts_clean() -> None:
    old = MeterSet("test", {"accuracy": Accuracy()})
    new = MeterSet("test", {"accuracy": Accuracy(), "top2": Accuracy(2)})
    output, target = batches()[4]
    for each in (old, new):
        each.update(torch.tensor(1.0), 5, output, target)
    new.load_state_dict(old.state_dict())
    assert new.compute()["test/accuracy"] == old.compute()["test/accuracy"]
    assert math.isnan(new.compute()["test/top2"])


def test_what_is_no_meter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="dict is neither") as error:
        MeterSet("test", {"mine": {}})
    assert error.value.key == "meters.mine"


def test_a_users_own_class_needs_no_base_of_ours() -> None:
    class Count:
        higher_is_better = None

        def __init__(self) -> None:
            self.n = 0

        def update(self, output: Any, target: Any) -> None:
            self.n += 1

        def compute(self) -> float:
            return self.n

        def reset(self) -> None:
            self.n = 0

        def to(self, device: torch.device) -> Any:
            return self

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]

        def summed(self) -> list[Tensor]:
            return []

    meters = MeterSet("test", {"count": Count()})
    meters.update(None, 1, None, None)
    assert meters.compute()["test/count"] == 1.0
