"""The plan of a stream on several processes: shares, stand-ins, and how long a pass is for all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phaseloop import ConfigError, Data, DataError
from phaseloop.engine.data.loaders import make_loader
from phaseloop.engine.data.plan import Piece
from phaseloop.engine.data.stream import StreamLoader
from phaseloop.engine.data.stream_ends import mark_of
from phaseloop.engine.data.stream_plan import StreamPlan
from tests.rigs import streams

CUTS: list[dict[str, int]] = [{}, {"micro_batch_size": 3}, {"micro_batch_size": 1},
                              {"accumulate": 2}, {"accumulate": 9}]  # fmt: skip


@given(st.integers(2, 5), st.integers(5, 20), st.sampled_from(CUTS), st.data())
def test_all_processes_make_as_many_micro_batches_as_the_largest_share_takes(
    world_size: int, batch_size: int, cut: dict[str, int], data: Any
) -> None:
    largest = math.ceil(batch_size / world_size)
    passes = 1
    if "accumulate" in cut:
        passes = min(cut["accumulate"], largest)
    elif cut:
        passes = math.ceil(largest / cut["micro_batch_size"])
    for rank in range(world_size):
        plan = StreamPlan(None, batch_size, world_size=world_size, rank=rank, **cut)
        size = data.draw(st.integers(1, plan.part(batch_size)))
        window = plan.window_of(100, size, ahead=7)
        assert (window.samples, window.share, window.ahead) == (size, size, 7)
        assert len(window.pieces) == passes
        counted = [p for piece in window.pieces if piece.weight
                   for p in range(piece.start, piece.stop)]  # fmt: skip
        assert counted == list(range(100, 100 + size))
        first = window.pieces[0]
        repeats = [piece for piece in window.pieces if not piece.weight]
        assert repeats == [Piece(first.start, first.stop, 0)] * len(repeats)


def test_the_shares_of_a_batch_are_all_of_it() -> None:
    plans = [StreamPlan(None, 11, world_size=3, rank=rank) for rank in range(3)]
    assert [plan.part(11) for plan in plans] == [4, 4, 3]


@pytest.mark.parametrize(
    ("samples", "readers", "options", "train", "test"),
    [
        # Of two processes four samples each in a batch of 8.
        (80, 1, {}, 10, 10),
        (81, 1, {}, 10, 11),  # 41 and 40: the first alone has an eleventh
        (79, 1, {}, 10, 10),
        (79, 1, {"drop_last": True}, 9, 10),  # 40 and 39
        # Of two workers 5 each: two windows each.
        (20, 2, {}, 4, 4),
        (80, 1, {"at_most": 3}, 3, 3),
        (None, 1, {}, math.inf, math.inf),
        (None, 1, {"at_most": 3}, 3, 3),
    ],
)
def test_a_pass_of_the_training_ends_with_the_first_and_a_test_with_the_last(
    samples: int, readers: int, options: dict[str, Any], train: float, test: float
) -> None:
    for rank in (0, 1):
        place = {"world_size": 2, "rank": rank, "readers": readers}
        plan = StreamPlan(samples, 8, **place, **options)
        assert plan.windows == train
        without = {k: v for k, v in options.items() if k != "drop_last"}
        assert StreamPlan(samples, 8, all_of_it=True, **place, **without).windows == test


def loader(rank: int, stream: Any, batch_size: int = 8, **options: Any) -> StreamLoader:
    """One of two processes."""
    more = {k: options.pop(k) for k in ("in_step", "train", "at_most") if k in options}
    data = Data(stream, batch_size, **options)
    data.open(0, "data.train")
    made = make_loader(
        data, source=0, device=torch.device("cpu"), key="data.train", seed=0, world_size=2,
        rank=rank, **{"train": True, **more},
    )  # fmt: skip
    assert isinstance(made, StreamLoader)
    return made


def test_each_window_says_how_much_this_process_has_for_the_next() -> None:
    for rank, sizes in ((0, [4, 4, 3]), (1, [4, 4, 2])):
        windows = [w for w, _ in loader(rank, streams.Shared(21)).batches(1, 0, 0)]
        assert [w.share for w in windows] == sizes
        assert [w.ahead for w in windows] == [*sizes[1:], 0]


def test_a_stand_in_is_the_first_micro_batch_once_more() -> None:
    made = loader(1, streams.Shared(10), micro_batch_size=1)
    batches = [batch for _, batch in made.batches(1, 0, 0)]
    ids = [batch.data["index"].tolist() for batch in batches if batch]
    assert [batch.weight for batch in batches if batch] == [1, 1, 1, 1, 1, 0, 0, 0]
    # Of ten samples in the order 7 i + 1 the second process has every second from 8 on.
    assert ids == [[8], [2], [6], [0], [4], [4], [4], [4]]


def test_in_a_test_a_process_that_has_run_out_gets_empty_batches_as_long_as_it_is_asked() -> None:
    batches = loader(1, streams.Shared(10), train=False).batches(1, 0, 0)
    found = [next(batches) for _ in range(4)]
    assert [(w.share, w.ahead, None if b is None else b.weight) for w, b in found] == [
        (4, 1, 4), (1, 0, 1), (0, 0, None), (0, 0, None),
    ]  # fmt: skip


def test_where_all_go_through_the_model_together_it_gets_its_last_ones_unmeasured() -> None:
    batches = loader(1, streams.Shared(10), train=False, in_step=True).batches(1, 0, 0)
    found = [next(batches) for _ in range(3)]
    assert [(w.share, b and b.weight, b and b.data["index"].tolist()) for w, b in found] == [
        (4, 4, [7, 1, 5, 9]), (1, 1, [3]), (0, 0, [3]),
    ]  # fmt: skip
    none = loader(1, streams.Shared(10, counts=(10, 0)), train=False, in_step=True)
    with pytest.raises(DataError, match=r"data\.train: rank 1 has no sample of the stream"):
        next(none.batches(1, 0, 0))


def test_a_process_without_a_share_of_a_batch_or_of_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.batch_size: 1 is less than the 2"):
        loader(0, streams.Shared(10), 1)
    with pytest.raises(ConfigError, match=r"data\.train\.batch_size: 1 is less than the 2"):
        loader(0, streams.Shared(10), {1: 4, 3: 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.train\.limit: 1 is less than the 2"):
        loader(0, streams.Shared(10), limit=1)


def test_a_dataset_is_told_its_place_before_it_is_read_also_when_it_is_alone() -> None:
    stream = streams.Shared(10)
    loader(1, stream)
    assert (stream.rank, stream.world_size) == (1, 2)
    data = Data(stream, 4)
    data.open(0, "data.train")
    make_loader(data, train=True, source=0, device=torch.device("cpu"), key="data.train", seed=0)
    assert (stream.rank, stream.world_size) == (0, 1)


def test_a_mark_is_of_all_values_of_a_batch() -> None:
    def batch(value: float = 1.0, name: str = "a", dtype: Any = torch.bfloat16) -> Any:
        return {"x": torch.tensor([[value, 2]], dtype=dtype), "y": [torch.tensor(3), name]}

    assert mark_of(batch()) == mark_of(batch())
    marks = [mark_of(batch(1.5)), mark_of(batch(name="b")), mark_of(batch(dtype=torch.float64)),
             mark_of({}), mark_of(batch())]  # fmt: skip
    assert len(set(marks)) == 5
    assert all(marks)
