"""The batch plan: every sample once, in equal pieces, the same number of passes on every rank."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloop.engine.data.plan import BatchPlan, Piece, Window, cut

CUTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 8)}),
    st.fixed_dictionaries({"accumulate": st.integers(1, 8)}),
)
PLANS = st.builds(
    lambda options, cut: {**options, **cut},
    st.fixed_dictionaries(
        {
            "samples": st.integers(1, 60),
            "batch_size": st.integers(1, 25),
            "drop_last": st.booleans(),
            "world_size": st.integers(1, 5),
        }
    ),
    CUTS,
)


def ranks(options: dict[str, Any], **more: Any) -> list[BatchPlan]:
    """The plans of all ranks."""
    return [BatchPlan(rank=rank, **options, **more) for rank in range(options["world_size"])]


def counted(windows: list[Window]) -> list[int]:
    """Positions that count in one batch, over ranks and pieces."""
    return [
        position
        for window in windows
        for piece in window.pieces
        if piece.weight
        for position in range(piece.start, piece.stop)
    ]


@given(PLANS)
def test_every_sample_counts_exactly_once_and_in_order(options: dict[str, Any]) -> None:
    plans = ranks(options)
    size, samples = options["batch_size"], options["samples"]
    used = samples - samples % size if options["drop_last"] else samples
    seen = []
    for index in range(plans[0].windows):
        batch = counted([plan.window(index) for plan in plans])
        assert batch == list(range(index * size, min((index + 1) * size, samples)))
        seen += batch
    assert seen == list(range(used))


@given(PLANS)
def test_the_number_of_windows_is_that_of_the_batches(options: dict[str, Any]) -> None:
    rounding = math.floor if options["drop_last"] else math.ceil
    expected = rounding(options["samples"] / options["batch_size"])
    assert {plan.windows for plan in ranks(options)} == {expected}


@given(PLANS)
def test_all_ranks_make_the_same_number_of_passes(options: dict[str, Any]) -> None:
    plans = ranks(options)
    for index in range(plans[0].windows):
        windows = [plan.window(index) for plan in plans]
        largest = max(window.share for window in windows)
        if "accumulate" in options:
            passes = min(options["accumulate"], largest)
        else:
            passes = math.ceil(largest / options.get("micro_batch_size", largest))
        assert {len(window.pieces) for window in windows} == {passes}


@given(PLANS)
def test_sizes_differ_by_at_most_one(options: dict[str, Any]) -> None:
    plans = ranks(options)
    micro = options.get("micro_batch_size")
    for index in range(plans[0].windows):
        windows = [plan.window(index) for plan in plans]
        shares = [window.share for window in windows]
        assert max(shares) - min(shares) <= 1
        for window in windows:
            sizes = [piece.weight for piece in window.pieces]
            assert sum(sizes) == window.share
            assert max(sizes) - min(sizes) <= 1
            assert micro is None or max(sizes) <= micro


@given(PLANS)
def test_a_stand_in_is_the_batchs_first_sample_and_weighs_nothing(options: dict[str, Any]) -> None:
    for plan in ranks(options):
        for index in range(plan.windows):
            start = index * options["batch_size"]
            for piece in plan.window(index).pieces:
                if piece.weight == 0:
                    assert piece == Piece(start, start + 1, 0)
                else:
                    assert piece.weight == piece.stop - piece.start


@given(PLANS)
def test_without_stand_ins_a_rank_that_is_short_gets_nothing(options: dict[str, Any]) -> None:
    with_, without = ranks(options), ranks(options, stand_ins=False)
    for one, other in zip(with_, without, strict=True):
        for index in range(one.windows):
            kept = tuple(piece for piece in one.window(index).pieces if piece.weight)
            start = index * options["batch_size"]
            assert other.window(index).pieces == (kept or (Piece(start, start, 0),))


@given(PLANS)
def test_every_rank_knows_the_size_of_the_whole_batch(options: dict[str, Any]) -> None:
    plans = ranks(options)
    for index in range(plans[0].windows):
        windows = [plan.window(index) for plan in plans]
        assert {window.samples for window in windows} == {len(counted(windows))}


@pytest.mark.parametrize(
    ("samples", "drop_last", "windows"), [(10, False, 3), (10, True, 2), (3, True, 0)]
)
def test_drop_last_goes_by_the_size_of_the_whole_batch(
    samples: int, drop_last: bool, windows: int
) -> None:
    for world in (1, 3):
        plan = BatchPlan(samples, 4, drop_last=drop_last, world_size=world)
        assert plan.windows == windows


def test_the_example_of_the_contract() -> None:
    """Ten samples as one batch, micro-batches of at most four: 4, 3, 3."""
    assert BatchPlan(10, 10, 4).window(0) == Window(
        (Piece(0, 4, 4), Piece(4, 7, 3), Piece(7, 10, 3)), samples=10, share=10
    )


def test_a_rank_without_a_sample_stands_in() -> None:
    """Two samples for three ranks."""
    windows = [BatchPlan(2, 4, world_size=3, rank=rank).window(0) for rank in range(3)]
    assert [window.pieces for window in windows] == [
        (Piece(0, 1, 1),),
        (Piece(1, 2, 1),),
        (Piece(0, 1, 0),),
    ]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_cut_gives_consecutive_parts(start: int, size: int, parts: int) -> None:
    borders = [cut(start, start + size, parts, index) for index in range(parts)]
    assert borders[0][0] == start
    assert borders[-1][1] == start + size
    assert all(a[1] == b[0] for a, b in pairwise(borders))
    sizes = [stop - first for first, stop in borders]
    assert sizes == sorted(sizes, reverse=True)  # the larger parts come first
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("samples", "world", "accumulate", "sizes"),
    [
        (12, 1, 1, [12]),
        (12, 1, 5, [3, 3, 2, 2, 2]),
        (12, 2, 3, [2, 2, 2]),
        (13, 2, 2, [4, 3]),  # the larger share has 7 samples
        (2, 1, 8, [1, 1]),  # no piece is empty
    ],
)
def test_accumulate_is_the_number_of_pieces(
    samples: int, world: int, accumulate: int, sizes: list[int]
) -> None:
    window = BatchPlan(samples, samples, accumulate=accumulate, world_size=world).window(0)
    assert [piece.weight for piece in window.pieces] == sizes
