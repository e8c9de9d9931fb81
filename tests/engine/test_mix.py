"""Mix: the order of an epoch of several sources, entered anywhere, in constant memory."""

from __future__ import annotations

import tracemalloc
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from phaseloop import ConfigError, DataError, Mix, Source
from phaseloop.engine.data import mix as mixes
from tests.rigs.probes import IndexData


def mixed(
    lengths: dict[str, int],
    weights: dict[str, float] | None = None,
    epoch_samples: int | None = None,
) -> Mix:
    weights = weights or {}
    sources = {n: Source(IndexData(k), weights.get(n, 1.0)) for n, k in lengths.items()}
    return Mix(sources, epoch_samples)


def order(mix: Mix, epoch: int = 1, seed: int = 0, **options: Any) -> Any:
    return mix.order(**{"shuffle": True, "seed": seed, "epoch": epoch, "roll_backs": 0, **options})


def by_source(mix: Mix, numbers: Tensor) -> list[list[int]]:
    """Indices of each source in the order they come."""
    indices, sources = mix.split(numbers)
    return [indices[sources == n].tolist() for n in range(len(mix.names))]


WHOLE_BLOCK = mixes._BLOCK


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few positions are several blocks."""
    monkeypatch.setattr(mixes, "_BLOCK", 16)


@pytest.fixture
def whole_blocks(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "_BLOCK", WHOLE_BLOCK)


def test_numbers_run_through_the_sources() -> None:
    indices, sources = mixed({"a": 5, "b": 3}).split(torch.tensor([0, 4, 5, 7]))
    assert indices.tolist() == [0, 4, 0, 2]
    assert sources.tolist() == [0, 0, 1, 1]


def test_an_epoch_is_as_long_as_the_sources_together_unless_said_otherwise() -> None:
    assert len(mixed({"a": 5, "b": 3})) == 8
    assert len(mixed({"a": 5, "b": 3}, epoch_samples=100)) == 100


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_is_gone_through_in_whole_passes(shuffle: bool) -> None:
    mix = mixed({"a": 5, "b": 3}, epoch_samples=203)
    a, b = by_source(mix, order(mix, shuffle=shuffle).slice(0, 203))
    assert len(a) + len(b) == 203
    for drawn, length in ((a, 5), (b, 3)):
        passes = [drawn[n : n + length] for n in range(0, len(drawn), length)]
        assert all(sorted(one) == list(range(length)) for one in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
        assert shuffle == any(one != sorted(one) for one in passes)


def test_shares_are_those_of_the_weights() -> None:
    mix = mixed({"a": 50, "b": 50}, {"a": 3.0, "b": 1.0}, epoch_samples=10_000)
    a, b = by_source(mix, order(mix).slice(0, 10_000))
    # Binomial: sigma = sqrt(10,000 * 3/4 * 1/4) = 43; five of them.
    assert abs(len(a) - 7500) < 5 * 43.3
    assert len(b) == 10_000 - len(a)


def test_choices_of_one_position_do_not_depend_on_the_next() -> None:
    """Pairs of neighbours are as often alike as independent draws are."""
    mix = mixed({"a": 9, "b": 9}, epoch_samples=10_001)
    _, sources = mix.split(order(mix).slice(0, 10_001))
    alike = int((sources[1:] == sources[:-1]).sum())
    assert abs(alike - 5000) < 5 * 50  # sigma = sqrt(10,000 / 4)


@pytest.mark.parametrize("cuts", [[0, 1, 203], [0, 15, 16, 17, 100, 203], list(range(0, 204, 7))])
def test_any_cut_gives_the_same_order(cuts: list[int]) -> None:
    mix = mixed({"a": 5, "b": 30, "c": 1}, {"b": 4.0}, epoch_samples=203)
    whole = order(mix).slice(0, 203).tolist()
    one = order(mix)
    pieces = [one.slice(a, b).tolist() for a, b in zip(cuts, [*cuts[1:], 203], strict=True)]
    assert list(chain(*pieces)) == whole
    # Entered in the middle, and going backwards too.
    for first in (202, 100, 33, 1):
        assert order(mix).slice(first, 203).tolist() == whole[first:]
        assert one.slice(first, min(first + 20, 203)).tolist() == whole[first : first + 20]


@pytest.mark.parametrize("processes", [2, 5, 40])
def test_shares_of_batches_are_picked_out_of_the_same_order(processes: int) -> None:
    """In blocks of 16: one is come back to often, or never."""
    mix = mixed({"a": 5, "b": 30, "c": 1}, {"b": 4.0}, epoch_samples=403)
    whole = order(mix).slice(0, 403)
    for rank in {0, 1, processes - 1}:
        one = order(mix)
        for start in range(rank, 403, processes):
            assert one.slice(start, start + 1).tolist() == [int(whole[start])]
    one = order(mix)
    for start in range(7, 360, 47):  # over the border of two blocks
        assert torch.equal(one.slice(start, start + 12), whole[start : start + 12])


@pytest.mark.usefixtures("whole_blocks")
def test_a_share_does_not_cost_what_a_block_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a thousand processes jumps from block to block, and needs a few of each."""
    asked: list[int] = []
    taken = mixes.Passes.slice

    def slice_(self: mixes.Passes, start: int, stop: int) -> Tensor:
        asked.append(stop - start)
        return taken(self, start, stop)

    monkeypatch.setattr(mixes.Passes, "slice", slice_)
    one = order(mixed({"a": 10**6, "b": 10**6}))
    for start in range(100, 10**6, 65536):
        one.slice(start, start + 66)
    assert sum(asked) == 66 * len(range(100, 10**6, 65536))


def test_the_order_depends_on_seed_epoch_and_roll_backs() -> None:
    mix = mixed({"a": 50, "b": 30})
    base = order(mix).slice(0, 80).tolist()
    assert order(mixed({"a": 50, "b": 30})).slice(0, 80).tolist() == base
    for other in (order(mix, seed=1), order(mix, epoch=2), order(mix, roll_backs=1)):
        numbers = other.slice(0, 80)
        assert numbers.tolist() != base
        first, second = mix.split(torch.tensor(base))[1], mix.split(numbers)[1]
        assert first.tolist() != second.tolist()  # the choice of sources, too


def test_limits_are_parts_of_each_source_the_same_in_every_epoch() -> None:
    sources = {"a": Source(IndexData(40), limit=4), "b": Source(IndexData(40), limit=0.1)}
    mix = Mix(sources, 100)
    assert len(Mix(sources)) == 8
    first = [set(drawn) for drawn in by_source(mix, order(mix).slice(0, 100))]
    second = [set(drawn) for drawn in by_source(mix, order(mix, epoch=2).slice(0, 100))]
    assert first == second
    assert [len(kept) for kept in first] == [4, 4]
    assert first[0] != first[1]
    other = [set(drawn) for drawn in by_source(mix, order(mix, seed=1).slice(0, 100))]
    assert other != first


@pytest.mark.usefixtures("whole_blocks")
def test_a_hundred_million_positions_cost_what_a_block_costs() -> None:
    mix = mixed({"a": 10**8, "b": 3 * 10**7, "c": 1000}, {"a": 2.0}, epoch_samples=10**8)
    tracemalloc.start()
    numbers = order(mix).slice(10**8 - 70, 10**8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(numbers) == 70
    # The table: 6,104 blocks of 3 counts of 8 bytes, and a few copies while it is made; and the
    # arrays of one block of 16,384 positions.
    assert peak < 20 * 6104 * 3 * 8 + 40 * 16384 * 8


@pytest.mark.usefixtures("whole_blocks")
def test_the_order_never_changes() -> None:
    """Recorded with torch 2.13 and NumPy 2; old runs are continued by it."""
    mix = mixed({"a": 10, "b": 6}, {"a": 2.0})
    assert order(mix, seed=42, epoch=3).slice(0, 16).tolist() == PINNED


PINNED = [0, 4, 7, 3, 5, 2, 6, 9, 8, 1, 13, 8, 6, 7, 4, 1]


@pytest.mark.parametrize(
    ("sources", "epoch_samples", "error", "key"),
    [
        ({}, None, ConfigError, "data.train.mix:"),
        ({"a": Source(IndexData(3), 0.0)}, None, ConfigError, "data.train.mix.a.weight"),
        ({"a": Source(IndexData(3), float("nan"))}, None, ConfigError, "data.train.mix.a.weight"),
        ({"a": Source(IndexData(3), float("inf"))}, None, ConfigError, "data.train.mix.a.weight"),
        ({"a": IndexData(3)}, 0, ConfigError, "data.train.epoch_samples"),
        ({"a": IndexData(0)}, None, DataError, "data.train.mix.a"),
        ({"a": iter([1])}, None, ConfigError, "data.train.mix.a.dataset"),
        ({"a": Source(IndexData(3), limit=4)}, None, ConfigError, "data.train.mix.a.limit"),
        ({"a": Source(IndexData(3), limit=1.5)}, None, ConfigError, "data.train.mix.a.limit"),
    ],
)
def test_what_cannot_be_mixed_is_an_error_with_its_key(
    sources: Any, epoch_samples: int | None, error: type[Exception], key: str
) -> None:
    with pytest.raises(error, match=key):
        Mix(sources, epoch_samples)
