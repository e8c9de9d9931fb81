"""Streams: what a loader of one does, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from phaseloop import ConfigError, Data, DataError, Debug, Mix, Phases, Stage, Task
from phaseloop.engine.checkpoint.loader_state import restore_loaders
from phaseloop.engine.data.loaders import make_loader
from phaseloop.engine.data.stream import StreamLoader
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.tools.find_lr import find_lr
from tests.rigs import r1, streams
from tests.rigs.probes import watch
from tests.rigs.r0 import r0, train, weight


def loader(stream: Any, batch_size: Any = 4, train: bool = True, **options: Any) -> StreamLoader:
    more = {k: options.pop(k) for k in ("at_most", "repeat", "seed") if k in options}
    data = Data(stream, batch_size, **options)
    data.open(0, "data.train")
    made = make_loader(
        data, train=train, source=0, device=torch.device("cpu"), key="data.train",
        **{"seed": 0, **more},
    )  # fmt: skip
    assert isinstance(made, StreamLoader)
    return made


def ids(loader: StreamLoader, epoch: int = 1, first: int = 0) -> list[list[int]]:
    """Ids of each micro-batch."""
    found = []
    for _, batch in loader.batches(epoch, 0, first):
        assert batch is not None
        found.append(batch.data["index"].tolist())
    return found


def draws(loader: StreamLoader, epoch: int = 1, first: int = 0) -> list[float]:
    """One number of each sample."""
    return [
        x
        for _, batch in loader.batches(epoch, 0, first)
        if batch is not None
        for x in batch.data["input"][:, 0].tolist()
    ]


class Draws(IterableDataset[Any]):
    """One draw from each generator, for each of 8 samples; each worker its part."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for _ in range(8 if info is None else 8 // info.num_workers):
            yield {"input": torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))],
                                         dtype=torch.float64)}  # fmt: skip


# --- windows ---


def test_the_last_window_is_known_as_the_last() -> None:
    made = loader(streams.Stream(10))
    windows = [window for window, _ in made.batches(1, 0, 0)]
    assert [(w.samples, w.share, w.last) for w in windows] == [
        (4, 4, False), (4, 4, False), (2, 2, True),
    ]  # fmt: skip


@pytest.mark.parametrize(("cut", "sizes"), [
    ({"micro_batch_size": 3}, [2, 2, 2, 2, 2]), ({"accumulate": 3}, [2, 1, 1, 2, 1, 1, 1, 1]),
])  # fmt: skip
def test_micro_batches_are_cut_and_numbered_as_of_other_data(
    cut: dict[str, int], sizes: list[int]
) -> None:
    found = [batch for _, batch in loader(streams.Stream(10), **cut).batches(1, 0, 0)]
    assert [batch.size for batch in found if batch] == sizes
    assert [i for batch in found if batch for i in batch.indices.tolist()] == list(range(10))
    assert all(batch and batch.indices.dtype == torch.int64 for batch in found)


def test_how_a_batch_is_cut_changes_no_sample() -> None:
    whole = draws(loader(streams.Stream(augment=True)))
    assert draws(loader(streams.Stream(augment=True), micro_batch_size=1)) == whole
    assert draws(loader(streams.Stream(augment=True), 8)) == whole


def test_with_workers_each_has_a_last_batch_of_its_own() -> None:
    made = loader(streams.Stream(10), workers=2)
    try:
        sizes = [window.samples for window, _ in made.batches(1, 0, 0)]
    finally:
        made.close()
    assert sizes == [4, 4, 1, 1]  # five samples each


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_draws_its_own_numbers_and_others_in_the_next_epoch(workers: int) -> None:
    made = loader(Draws(), workers=workers)
    try:
        epochs = [
            torch.cat([b.data["input"] for _, b in made.batches(epoch, 0, 0) if b])
            for epoch in (1, 2, 1)
        ]
    finally:
        made.close()
    assert epochs[0].shape == (8, 3)
    assert torch.equal(epochs[0], epochs[2])
    drawn = torch.cat(epochs[:2])
    for column in drawn.T:
        assert len(set(column.tolist())) == 16


def test_reading_leaves_this_process_s_generators_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = r1.draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in loader(streams.Stream(augment=True)).batches(1, 0, 0):
        pass
    assert r1.draws() == before


def test_what_is_drawn_when_a_pass_begins_belongs_to_the_epoch() -> None:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = loader(streams.Buffered(draws_order=True))
        orders.append([ids(made, epoch) for epoch in (1, 2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("kind", streams.KINDS)
@pytest.mark.parametrize("first", range(11))
def test_from_any_window_on(kind: str, first: int) -> None:
    """The state behind each window, taken to another loader, goes on with the next sample."""
    whole = draws(loader(streams.KINDS[kind](augment=True)), 2)
    made = loader(streams.KINDS[kind](augment=True))
    seen, state = [], made.state_dict(2, 0)
    batches = made.batches(2, 0, 0)
    for number in range(1, first + 1):
        _, batch = next(batches)
        assert batch is not None
        seen += batch.data["input"][:, 0].tolist()
        state = made.state_dict(2, number)
    if first == 10:
        return
    other = loader(streams.KINDS[kind](augment=True))
    other.load_state_dict(state)
    assert seen + draws(other, 2, first) == whole


def test_the_same_loader_goes_back_to_a_window() -> None:
    """As after running out of memory: the pieces are smaller, the samples the same."""
    for kind in streams.KINDS.values():
        made = loader(kind(augment=True))
        whole = draws(made, 2)
        batches = made.batches(2, 0, 0)
        next(batches), next(batches)
        made.cut_smaller(2)
        window = made.window_again(2, 1)
        assert [(p.start, p.stop, p.weight) for p in window.pieces] == [(4, 6, 2), (6, 8, 2)]
        assert draws(made, 2, 1) == whole[4:]
        assert all(len(part) == 2 for part in ids(made, 3))


def test_a_pass_does_not_depend_on_those_before_it() -> None:
    for kind in streams.KINDS.values():
        alone, after = loader(kind()), loader(kind())
        next(after.batches(1, 0, 0))  # given up
        assert ids(after, 2) == ids(alone, 2)
        assert ids(after, 3) == ids(loader(kind()), 3)


def test_a_reader_that_has_ended_is_not_asked_again() -> None:
    """With the others still at work, it goes to a new process as one that has ended."""

    class ToItsStart(streams.Stateful):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            self.position = 0

    whole = loader(ToItsStart(11), workers=2)
    other = loader(ToItsStart(11), workers=2)
    try:
        expected = ids(whole)  # 6 and 5 samples: 4, 4, 2, 1
        batches = whole.batches(1, 0, 0)
        for _ in range(3):
            next(batches)
        other.load_state_dict(whole.state_dict(1, 3))
        assert ids(other, 1, 3) == expected[3:]
    finally:
        whole.close()
        other.close()


def test_the_stream_is_told_the_epoch_in_workers_too() -> None:
    made = loader(streams.Stream(), workers=2)
    try:
        assert [ids(made, epoch)[0] for epoch in (1, 2)] == [
            ids(loader(streams.Stream(), workers=0), epoch)[0][::2]
            + [ids(loader(streams.Stream()), epoch)[1][i] for i in (0, 2)]
            for epoch in (1, 2)
        ]
    finally:
        made.close()


def test_a_test_stream_is_the_same_each_time() -> None:
    made = loader(streams.Stream(6, augment=True), train=False)
    assert draws(made, 1) == draws(made, 5)


def test_a_test_stream_that_can_be_gone_through_once_is_an_error() -> None:
    made = loader(streams.OnePass(6), train=False)
    draws(made, 1)
    with pytest.raises(DataError, match="gave nothing when it was gone through again"):
        draws(made, 2)


# --- lengths ---


@pytest.mark.parametrize(("claims", "gave"), [
    (44, "11 batches of a pass; it gave 40 samples in 10 batches"),
    (36, "9 batches of a pass; it gave more than 36 samples in 9 batches"),
    (39, "39 samples in 10 batches of a pass; it gave 40"),
])  # fmt: skip
def test_a_length_that_is_wrong_is_an_error_with_the_numbers(claims: int, gave: str) -> None:
    made = loader(streams.WithLength(claims=claims))
    with pytest.raises(DataError, match=gave):
        draws(made)


def test_a_length_is_planned_with() -> None:
    assert loader(streams.WithLength()).windows == 10
    assert loader(streams.WithLength(10), workers=3).windows == 3  # 4, 3, 3
    assert loader(streams.WithLength(10), 3, workers=3).windows == 4  # 3 + 1, 3, 3
    assert loader(streams.Stream()).windows == float("inf")
    assert loader(streams.WithLength(), limit=10).samples == 10
    assert [len(b) for b in ids(loader(streams.WithLength(), limit=10))] == [4, 4, 2]


def test_batch_size_by_epoch() -> None:
    made = loader(streams.Stream(10), {1: 4, 2: 5})
    assert [[len(b) for b in ids(made, epoch)] for epoch in (1, 2, 3)] == [
        [4, 4, 2],
        [5, 5],
        [5, 5],
    ]


def test_parts_of_an_epoch_need_a_length() -> None:
    for phases, key in [
        ({"epochs": 2.5}, "phases.epochs"),
        ({"epochs": 2, "test_every_epochs": 0.5}, "phases.test_every_epochs"),
    ]:
        with pytest.raises(ConfigError, match=f"^{key}: .* is a part of an epoch"):
            r1.make_task(None, train=Data(streams.Stream(), 4), phases=[Stage(**phases)])
    task = r1.make_task(None, train=Data(streams.WithLength(), 4), phases=[Stage(epochs=2.5)])
    assert train(task).updates == 25


# --- what a stream cannot have ---


@pytest.mark.parametrize(("options", "key"), [
    ({"shuffle": True}, "shuffle"), ({"limit": 0.5}, "limit"), ({"rebuild_every": 2}, "rebuild"),
])  # fmt: skip
def test_what_a_stream_cannot_have_is_named(options: dict[str, Any], key: str) -> None:
    stream: Any = streams.Stream
    made = stream if key == "rebuild" else stream()
    with pytest.raises(ConfigError, match=rf"^data\.train\.{key}"):
        r1.make_task(None, train=Data(made, 4, **options))


def test_a_sampler_and_a_mix_are_refused() -> None:
    from phaseloop import Sampler
    from phaseloop.engine.data.samplers import Weighted

    with pytest.raises(ConfigError, match=r"^data\.train\.sampler: a stream comes in its own"):
        r1.make_task(None, train=Data(streams.Stream(), 4, sampler=Sampler(Weighted, [1.0])))
    with pytest.raises(ConfigError, match=r"^data\.train\.mix\.a\.dataset: Stream is a stream"):
        Mix({"a": streams.Stream(), "b": r1.Samples()})


def test_rolling_back_is_refused_at_the_start() -> None:
    task = r1.make_task(None, train=Data(streams.Stateful(), 4))
    hook = NonFinite(policy="roll_back")
    with pytest.raises(ConfigError, match=r"policy: a roll-back goes on with the data in another"):
        train(task, non_finite=hook)


def test_a_state_that_a_checkpoint_cannot_hold_is_named_at_once() -> None:
    task = r1.make_task(None, train=Data(streams.NumpyState(), 4))
    with pytest.raises(DataError, match=r"^data\.train\.dataset: .*numpy"):
        train(task)


def test_another_number_of_processes_is_refused() -> None:
    task = r1.make_task(None, train=Data(streams.Stateful(), 4))
    task.build()
    with pytest.raises(ConfigError, match=r"^backend\.processes: 1 now and 2 in the checkpoint"):
        restore_loaders(task, [{}, {}])


def test_a_state_dict_that_needs_a_pass_first_is_named() -> None:
    class Late(streams.Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    with pytest.raises(DataError, match=r"^data\.train\.dataset: Late\.state_dict\(\) has to work"):
        draws(loader(Late()))


def test_a_range_test_wants_a_function_that_makes_the_task() -> None:
    def make() -> Task:
        return r1.make_task(None, train=Data(streams.Stateful(), 4), epochs=1)

    with pytest.raises(ConfigError, match=r"^data\.train\.dataset: .*function that makes the task"):
        find_lr(make())
    assert len(find_lr(make).losses) > 10


# --- with the rest of the engine ---


def test_quick_tries() -> None:
    fast = r1.make_task(None, train=Data(streams.Stream(), 4), debug=Debug(fast=3))
    assert train(fast).updates == 3
    probe = watch("on_step", lambda task: task.batch.data["index"].tolist())
    data = Data(streams.Stateful(augment=True), 4)
    overfit = r1.make_task(None, train=data, debug=Debug(overfit=2), epochs=3)
    assert train(overfit, probe=probe).updates == 6
    assert probe.seen[:2] == probe.seen[2:4] == probe.seen[4:]


def test_a_phase_that_is_ended_early_leaves_the_next_pass_whole() -> None:
    def look(task: Task) -> Any:
        if task.progress.updates == 5:
            task.end_phase("asked for by the test")
        return task.progress.epoch

    probe = watch("on_step", look)
    assert train(r1.make_task(None, train=streams.data("stateful"), epochs=2), probe=probe)
    assert [probe.seen.count(epoch) for epoch in (1, 2)] == [5, 10]


def test_stages_of_streams_and_of_other_data() -> None:
    stages = [
        Stage(name="a", epochs=1, train=Data(streams.Stateful(), 4)),
        Stage(name="b", updates=5, train=Data(r1.Samples(), 4)),
        Stage(name="c", updates=15, train=Data(streams.WithLength(), 4)),
    ]
    task = r1.make_task(None, phases=stages)
    assert train(task).updates == 30
    assert isinstance(stages[0], Phases)


def test_none_from_collate_is_skipped() -> None:
    def collate(samples: list[Any]) -> Any:
        kept = [s["index"] for s in samples]
        return None if 0 in kept else torch.utils.data.default_collate(samples)

    data = Data(streams.Stream(), 4, collate=collate)
    assert train(r1.make_task(None, train=data, epochs=1)).updates == 9


def test_out_of_memory_redoes_the_window() -> None:
    def step(task: Task) -> None:
        batch = task.next_batch()
        if task.progress.updates == 3 and batch.size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(batch.data["index"].tolist())
        task.backward(task.criterion(task.forward(batch.input), batch.target))
        task.update()

    seen: list[list[int]] = []
    task = r1.make_task(None, train=streams.data("stateful"), epochs=1, train_step=step)
    assert train(task, fit_memory=FitMemory()).updates == 10
    assert [len(x) for x in seen] == [4, 4, 4] + [2] * 14
    assert sorted(i for x in seen for i in x) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", streams.KINDS)
def test_out_of_memory_in_a_test_redoes_the_window(kind: str, workers: int) -> None:
    """In its third batch: no sample of the test is read twice, or never."""

    def step(task: Task) -> None:
        batch = task.next_batch()
        loss = task.criterion(task.forward(batch.input), batch.target)
        if task.train:
            task.backward(loss)
            task.update()
            return
        if task.phase.position == 2 and batch.size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(batch.data["index"].tolist())

    seen: list[list[int]] = []
    test = streams.data(kind, workers)
    task = r1.make_task(None, epochs=1, test={"test": test}, train_step=step)
    train(task, fit_memory=FitMemory())
    assert [len(x) for x in seen] == [4, 4] + [2] * 16
    assert sorted(i for x in seen for i in x) == list(range(40))


def test_what_cannot_be_begun_again_is_not_read_on_from_where_it_is() -> None:
    """A smaller micro-batch reads the pass again: here the rest would be taken for its start."""

    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.samples = iter([r1.Samples()[i] for i in range(40)])

        def __iter__(self) -> Iterator[Any]:
            return self.samples

    made = loader(Once())
    batches = made.batches(1, 0, 0)
    for _ in range(3):
        next(batches)
    made.cut_smaller(2)
    with pytest.raises(DataError, match=r"^data\.train\.dataset: Once has to be read again"):
        ids(made, 1, 2)


class Endless(IterableDataset[int]):
    """Its own iterator: 0, 1, 2 and so on."""

    at = -1

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


class Told(Endless):
    """The same with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    ("stream", "limit", "warned"),
    [(Endless(), 8, True), (Endless(), None, False), (Told(), 8, False)],
)
def test_a_limit_on_a_stream_that_goes_on_by_itself_is_told(
    stream: Any, limit: int | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(stream, 4, limit=limit)
    data.open(0, "data.train")
    data.check("data.train", train=True)
    assert (
        "data.train.limit: a pass does not read this stream to its end" in caplog.text
    ) == warned


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_before_the_first_sample_is_no_end(workers: int) -> None:
    class Bad(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([next(iter([]))])

    made = loader(Bad(), workers=workers)
    with pytest.raises(DataError, match=r"beginning a pass raised StopIteration"):
        made.has_pass(1)
    made.close()


def test_a_length_that_there_is_not_is_none() -> None:
    class Unknown(streams.Stream):
        def __len__(self) -> int:
            raise TypeError("it depends")

    assert train(r1.make_task(None, train=Data(Unknown(), 4), epochs=1)).updates == 10


def test_a_stream_is_read_by_one_set_only() -> None:
    """In this process a test would move the stream on, and the training would lose samples."""
    stream = streams.Stateful()
    one = Data(stream, 4)
    with pytest.raises(ConfigError, match=r"^data\.test\.dataset: .*data\.train\.dataset"):
        r1.make_task(None, train=one, test={"test": Data(stream, 8)})
    with pytest.raises(ConfigError, match=r"^data\.test\.dataset: "):
        r1.make_task(None, train=one, test={"test": one})
    with pytest.raises(ConfigError, match=r"^phases\.b\.data\.train\.dataset: "):
        stages = [
            Stage(name="a", epochs=1, train=one),
            Stage(name="b", epochs=1, train=Data(stream, 8)),
        ]
        r1.make_task(None, phases=stages)
    stages = [Stage(name="a", epochs=1, train=one), Stage(name="b", epochs=1, train=one)]
    assert train(r1.make_task(None, phases=stages)).updates == 20  # one set, in two stages


def test_an_endless_pass_that_gives_nothing_is_an_error() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(int, 1)

    data = Data(Endless(), 4, collate=lambda samples: None)
    task = r1.make_task(None, train=data, epochs=None, phases={"updates": 5})
    with pytest.raises(
        DataError, match=r"the last 1000 windows were all skipped; the last because"
    ):
        train(task)


def test_what_is_read_beside_moves_nothing() -> None:
    made = loader(streams.Stateful(augment=True))
    whole = draws(made)
    batches = made.batches(1, 0, 0)
    first = next(batches)[1]
    assert first is not None
    assert draws(made.beside()) == whole
    rest = [x for _, b in batches if b for x in b.data["input"][:, 0].tolist()]
    assert first.data["input"][:, 0].tolist() + rest == whole


def test_a_stream_that_cannot_be_copied_cannot_be_read_beside() -> None:
    class Open(streams.Stream):
        def __init__(self) -> None:
            super().__init__()
            self.lines = (x for x in range(3))

    with pytest.raises(ConfigError, match=r"^data\.train\.dataset: it has to be read beside"):
        loader(Open()).beside()


def test_weights_of_a_short_batch() -> None:
    """GA-a in micro-batches is in tests/contract; here on its own: w = -5.5 of 1..10 in 4, 3, 3."""
    x = torch.arange(1.0, 11.0)

    class Ten(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(x)

    task = r0([0], 4, train=Data(Ten(), 16, micro_batch_size=4))
    train(task)
    assert weight(task) == pytest.approx(-5.5, abs=1e-5)
