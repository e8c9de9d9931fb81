"""Samplers: what an epoch draws by labels or weights, in an order that can be entered anywhere."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phaseloop import ConfigError, DataError, RegistryError, Sampler, register_sampler
from phaseloop.engine.data import samplers
from phaseloop.engine.data.order import uniform
from tests.rigs.probes import IndexData

LABELS = [0] * 10 + [1] * 3 + [2] * 1


class Labelled(IndexData):
    """14 samples of three classes."""

    def __init__(self) -> None:
        super().__init__(len(LABELS))
        self.targets = LABELS
        self.weights = [0.0 if n == 2 else 1.0 + n for n in LABELS]


def drawn(sampler: Sampler, epoch: int = 1, seed: int = 0, chosen: Tensor | None = None) -> Any:
    orders = sampler.orders(Labelled(), chosen, "data.train.sampler")
    return orders.order(seed, epoch).slice(0, orders.samples).tolist()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few positions are several blocks."""
    monkeypatch.setattr(samplers, "_BLOCK", 9)


@pytest.mark.parametrize("per_class", [None, 1, 7, 25])
def test_balanced_draws_every_class_equally_often(per_class: int | None) -> None:
    options = {} if per_class is None else {"per_class": per_class}
    numbers = drawn(Sampler("balanced", **options))
    each = per_class or 5  # 14 samples over 3 classes, rounded up
    assert Counter(LABELS[n] for n in numbers) == {0: each, 1: each, 2: each}
    # Each round of three positions holds each class once.
    for start in range(0, len(numbers), 3):
        assert sorted(LABELS[n] for n in numbers[start : start + 3]) == [0, 1, 2]


def test_balanced_takes_no_sample_twice_within_a_pass() -> None:
    numbers = drawn(Sampler("balanced", per_class=25))
    for label, members in ((0, range(10)), (1, range(10, 13)), (2, [13])):
        mine = [n for n in numbers if LABELS[n] == label]
        size = len(members)
        passes = [mine[k : k + size] for k in range(0, 25, size)]
        assert all(len(set(one)) == len(one) for one in passes)
        assert all(sorted(one) == list(members) for one in passes if len(one) == size)


def test_balanced_orders_classes_and_samples_anew() -> None:
    numbers = drawn(Sampler("balanced", per_class=20))
    rounds = {tuple(LABELS[n] for n in numbers[k : k + 3]) for k in range(0, 60, 3)}
    assert len(rounds) > 1
    mine = [n for n in numbers if LABELS[n] == 0]
    assert mine[:10] != mine[10:20]


def test_weighted_draws_in_proportion() -> None:
    numbers = drawn(Sampler("weighted", samples=16_000))
    counts = Counter(numbers)
    # Weights 1 for ten samples, 2 for three, 0 for the last: 16 in all.
    for n, label in enumerate(LABELS):
        share = [1, 2, 0][label] / 16
        sigma = (16_000 * share * (1 - share)) ** 0.5
        assert abs(counts[n] - 16_000 * share) <= 5 * sigma
    assert counts[13] == 0


def test_weighted_is_as_long_as_the_dataset_unless_said_otherwise() -> None:
    assert len(drawn(Sampler("weighted"))) == 14


def test_the_last_sample_with_a_weight_is_the_last_that_can_be_drawn() -> None:
    """Rounding may make a draw of almost 1 the whole sum."""
    weighted = samplers.Weighted([0.1] * 10 + [0.0], samples=1)
    assert weighted.last == 9


@pytest.mark.parametrize(
    "sampler", [Sampler("balanced", per_class=25), Sampler("weighted", samples=75)]
)
def test_any_cut_gives_the_same_order(sampler: Sampler) -> None:
    whole = drawn(sampler)
    orders = sampler.orders(Labelled(), None, "key")
    for cuts in ([0, 1, 75], [0, 8, 9, 10, 30, 75], list(range(0, 76, 4))):
        one = orders.order(0, 1)
        pieces = [one.slice(a, b).tolist() for a, b in pairwise([*cuts, 75])]
        assert list(chain(*pieces)) == whole
        assert orders.order(0, 1).slice(cuts[1], 75).tolist() == whole[cuts[1] :]


@pytest.mark.parametrize("block", [3, 6, 30, samplers._BLOCK])
@pytest.mark.parametrize("processes", [2, 7, 25])
def test_shares_of_batches_are_picked_out_of_the_same_order(
    block: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "_BLOCK", block)
    orders = Sampler("balanced", per_class=40).orders(Labelled(), None, "key")
    whole = orders.order(0, 1).slice(0, orders.samples)
    for width in (1, 4):
        one = orders.order(0, 1)
        for start in range(1, orders.samples - width, processes):
            assert torch.equal(one.slice(start, start + width), whole[start : start + width])


@pytest.mark.parametrize("kind", ["balanced", "weighted"])
def test_orders_depend_on_seed_and_epoch(kind: str) -> None:
    base = drawn(Sampler(kind))
    assert drawn(Sampler(kind)) == base
    assert drawn(Sampler(kind), epoch=2) != base
    assert drawn(Sampler(kind), seed=1) != base


def test_a_limit_leaves_out_values_too() -> None:
    chosen = torch.tensor([0, 1, 2, 10, 13])
    orders = Sampler("balanced").orders(Labelled(), chosen, "key")
    positions = orders.order(0, 1).slice(0, orders.samples)
    assert Counter(LABELS[n] for n in chosen[positions].tolist()) == {0: 2, 1: 2, 2: 2}


def first_come(values: Any, seed: int, epoch: int, times: int = 1) -> Tensor:
    """Positions by their values, forwards in odd epochs, backwards in even ones."""
    order = torch.from_numpy(np.argsort(values, kind="stable")).repeat(times)
    return order if epoch % 2 else order.flip(0)


class Lazy:
    """The same as a class whose orders are worked out where they are asked for."""

    def __init__(self, values: Any, times: int = 1) -> None:
        self.values = values
        self.times = times

    def __call__(self, seed: int, epoch: int) -> Any:
        numbers = first_come(self.values, seed, epoch, self.times)

        class Order:
            def __len__(self) -> int:
                return len(numbers)

            def slice(self, start: int, stop: int) -> Tensor:
                return numbers[start:stop]

        return Order()


@pytest.mark.parametrize("kind", [first_come, Lazy])
def test_a_sampler_of_ones_own(kind: Any) -> None:
    for by in ("targets", lambda dataset: dataset.targets, LABELS, torch.tensor(LABELS)):
        sampler = Sampler(kind, by=by, times=2)
        assert drawn(sampler) == list(range(14)) * 2
        assert drawn(sampler, epoch=2) == (list(range(14)) * 2)[::-1]


def test_a_registered_sampler_says_what_it_goes_by() -> None:
    register_sampler("test_by_weight", by="weights", replace=True)(first_come)
    assert drawn(Sampler("test_by_weight")) == [13, *range(10), 10, 11, 12]
    assert drawn(Sampler(first_come)) == drawn(Sampler("test_by_weight"))
    with pytest.raises(RegistryError, match=r"no sampler is called 'ballanced'.*'balanced'"):
        Sampler("ballanced")


@pytest.mark.parametrize(
    ("sampler", "error", "says"),
    [
        (Sampler("balanced", by="labels"), ConfigError, "sampler.by: .*no attribute 'labels'"),
        (Sampler("balanced", by=[1, 2]), ConfigError, "sampler.by: .*2 values for the 14 samples"),
        (Sampler("balanced", by=[[1]] * 14), ConfigError, "sampler.by: .*shape"),
        (Sampler("balanced", per_class=0), ConfigError, "sampler.per_class: 0"),
        (Sampler("weighted", samples=0), ConfigError, "sampler.samples: 0"),
        (Sampler("weighted", by=[0.0] * 14), ConfigError, "sampler.by: weights"),
        (Sampler("weighted", by=[-1.0] * 14), ConfigError, "sampler.by: weights"),
        (Sampler("weighted", by=[float("nan")] * 14), ConfigError, "sampler.by: weights"),
        (Sampler(lambda values, seed, epoch: [1, 2]), DataError, "not list"),
        (Sampler(lambda values, seed, epoch: torch.rand(3)), DataError, "not Tensor"),
        (Sampler(lambda values, seed, epoch: torch.arange(0)), DataError, "draws no sample"),
        (
            Sampler(lambda values, seed, epoch: torch.arange(epoch)),
            DataError,
            "2 samples in epoch",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_drawn_is_an_error(
    sampler: Sampler, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        drawn(sampler, epoch=2)


def test_uniform_draws_are_functions_of_their_position() -> None:
    draws = uniform(0, 20_000, 7)
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(draws.mean() - 0.5) < 5 / (12 * 20_000) ** 0.5
    assert abs((draws < 0.1).mean() - 0.1) < 5 * (0.09 / 20_000) ** 0.5
    assert (uniform(500, 600, 7) == draws[500:600]).all()
    assert (uniform(0, 10, 8) != draws[:10]).all()


def test_facts_tell_samplers_apart_and_have_no_address() -> None:
    """They are compared with those of another process, where everything lies elsewhere."""

    class Key:
        pass

    def facts(**options: Any) -> dict[str, Any]:
        return Sampler("weighted", **options).facts()

    assert facts(by=lambda d: 0, key=Key()) == facts(by=lambda d: 1, key=Key())
    assert "0x" not in str(facts(by=lambda d: 0, key=Key(), again=max))
    assert facts(by=[0.5] * 20) == facts(by=torch.full((20,), 0.5))
    assert facts(by=[0.5] * 20) != facts(by=[0.5] * 21)
    assert facts(samples=3) != facts(samples=4)
