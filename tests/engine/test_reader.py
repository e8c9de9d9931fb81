"""Reading: three forms of dataset, each sample with its own random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from phaseloop import Data, DataError, TensorData
from phaseloop.engine import rng
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.reader import Reader, Request
from tests.rigs.probes import DrawData, IndexData

# More workers than cores is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")
DRAWS = (random.random, np.random.rand, lambda: float(torch.rand(())))


def request(*indices: int, seed: int = 5, first_key: int | None = 0) -> Request:
    return Request(torch.tensor(indices), seed, first_key, len(indices))


class Many(IndexData):
    """Has both forms that torch knows; the list form is the one to be used."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.calls.append(indices)
        return [torch.tensor(10 * index) for index in indices]


class ManyDraws(IndexData):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.rand(()) for _ in indices]


class Fetching(Many):
    """Has all three forms."""

    def fetch(self, indices: Tensor) -> Any:
        return indices * 100


# --- the forms ---


def test_a_sample_at_a_time() -> None:
    data = Reader(IndexData(10))[request(3, 1, 2)]
    assert data.tolist() == [3, 1, 2]


def test_a_list_of_samples_at_a_time() -> None:
    dataset = Many(10)
    assert Reader(dataset)[request(3, 1, 2)].tolist() == [30, 10, 20]
    assert dataset.calls == [[3, 1, 2]]
    assert all(type(index) is int for index in dataset.calls[0])


def test_a_batch_at_a_time() -> None:
    dataset = Fetching(10)
    assert Reader(dataset)[request(3, 1, 2)].tolist() == [300, 100, 200]
    assert dataset.calls == []


def test_a_collate_function_of_the_user_gets_the_samples() -> None:
    def collate(samples: list[Tensor]) -> Any:
        return {"sum": sum(samples)}

    for dataset, expected in ((IndexData(10), 6), (Many(10), 60)):
        assert Reader(dataset, collate)[request(3, 1, 2)]["sum"] == expected


def test_tensors_in_memory() -> None:
    x, y = torch.arange(10.0), torch.arange(10) * 2
    both, alone = TensorData(x, y), TensorData(x)
    assert len(both) == 10
    assert both[3] == (3.0, 6)
    assert alone[3] == 3.0
    rows = both.fetch(torch.tensor([4, 2]))
    assert isinstance(rows, tuple)
    assert [row.tolist() for row in rows] == [[4.0, 2.0], [8, 4]]
    assert alone.fetch(torch.tensor([4, 2])).tolist() == [4.0, 2.0]
    with pytest.raises(DataError, match=r"\[3, 10\]"):
        TensorData(x, y[:3])


# --- random numbers ---


def sample(draw: Callable[[Request], Any], *keys: int, **options: Any) -> Any:
    return draw(request(*keys, **options)).tolist()


def test_each_sample_is_seeded_from_its_key() -> None:
    read = Reader(DrawData(10)).__getitem__
    # The key counts from first_key, whatever the indices are.
    assert sample(read, 3, 1, first_key=7) == sample(read, 8, 9, first_key=7)
    assert sample(read, 3, 1, first_key=7)[1] == sample(read, 1, first_key=8)[0]
    # Without one the index is the key.
    assert sample(read, 3, 1, first_key=None)[0] == sample(read, 3, first_key=None)[0]
    assert sample(read, 3, 1, first_key=None)[1] == sample(read, 1, first_key=None)[0]
    assert sample(read, 3, seed=5) != sample(read, 3, seed=6)


def test_a_samples_draws_are_those_of_its_seed() -> None:
    rng.seed_host(rng.mix(5, 7))
    expected = [random.random(), np.random.rand(), float(torch.rand(()))]
    assert sample(Reader(DrawData(10)).__getitem__, 3, first_key=7) == [expected]


def test_a_list_of_samples_is_seeded_once_per_call() -> None:
    read = Reader(ManyDraws(10)).__getitem__
    torch.default_generator.manual_seed(rng.mix(5, 7))
    expected = [float(torch.rand(())) for _ in range(2)]
    assert sample(read, 3, 1, first_key=7) == pytest.approx(expected)
    assert sample(read, 3, 1, first_key=7) == sample(read, 3, 1, first_key=7)


def test_draws_in_a_collate_function_do_not_depend_on_the_samples_draws() -> None:
    def collate(samples: list[Any]) -> Tensor:
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])

    with_draws = Reader(DrawData(10), collate)[request(3, 1)]
    without = Reader(IndexData(10), collate)[request(3, 1)]
    assert torch.equal(with_draws, without)
    assert not torch.equal(Reader(IndexData(10), collate)[request(3, 1, first_key=9)], without)


SUBSETS: dict[str, Callable[[Dataset[Any]], Dataset[Any]]] = {
    "subset": lambda d: Subset(d, range(8)),
    "subset_of_a_subset": lambda d: Subset(Subset(d, range(9)), range(8)),
    "three_deep": lambda d: Subset(Subset(Subset(d, range(9)), range(9)), range(8)),
    "random_split": lambda d: random_split(d, [8, 2])[0],
    "split_of_a_split": lambda d: random_split(random_split(d, [9, 1])[0], [8, 1])[0],
    "concat": lambda d: ConcatDataset([d, d]),
    "subset_of_concat": lambda d: Subset(ConcatDataset([d, d]), range(8)),
}


@pytest.mark.parametrize("kind", sorted(SUBSETS))
def test_a_part_of_a_dataset_is_seeded_sample_by_sample(kind: str) -> None:
    read = Reader(SUBSETS[kind](DrawData(10))).__getitem__
    together = sample(read, 0, 1, 2)
    apart = [sample(read, index, first_key=index)[0] for index in range(3)]
    assert together == apart


@pytest.mark.parametrize("kind", ["subset", "subset_of_a_subset"])
def test_a_part_passes_on_a_list_form_where_there_is_one(kind: str) -> None:
    dataset = Many(10)
    assert Reader(SUBSETS[kind](dataset))[request(3, 1)].tolist() == [30, 10]
    assert dataset.calls == [[3, 1]]


def test_a_part_of_tensors_in_memory() -> None:
    part = Subset(TensorData(torch.arange(10.0)), [5, 7, 9])
    assert Reader(part)[request(2, 0)].tolist() == [9.0, 5.0]


# --- by the loader ---


def loaded(dataset: Any, train: bool = True, epoch: int = 1, **options: Any) -> list[Any]:
    """All samples of an epoch in order."""
    data = Data(dataset, **{"batch_size": 4, **options})
    loader = Loader(data, train=train, source=0, seed=3, device=CPU)
    try:
        found = [batch.data for _, batch in loader.batches(epoch, 0, 0)]
    finally:
        loader.close()
    return torch.cat(found).tolist()


@given(st.integers(1, 12), st.none() | st.integers(1, 5), st.booleans())
def test_draws_do_not_depend_on_the_cut(batch: int, micro: int | None, train: bool) -> None:
    cut = loaded(DrawData(10), train, batch_size=batch, micro_batch_size=micro)
    assert cut == loaded(DrawData(10), train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("workers", [1, 3])
def test_draws_do_not_depend_on_workers(workers: int, train: bool) -> None:
    assert loaded(DrawData(10), train, workers=workers) == loaded(DrawData(10), train)


def test_train_and_test_draws_differ_and_only_train_goes_by_the_epoch() -> None:
    train = [loaded(DrawData(10), True, epoch, shuffle=False) for epoch in (1, 2)]
    test = [loaded(DrawData(10), False, epoch) for epoch in (1, 2)]
    assert test[0] == test[1]
    assert train[0] != train[1]
    assert not {tuple(row) for row in train[0]} & {tuple(row) for row in test[0]}


def test_two_sets_of_one_kind_draw_apart() -> None:
    def of(source: int) -> Any:
        loader = Loader(Data(DrawData(4), 4), train=False, source=source, seed=3, device=CPU)
        return [batch.data.tolist() for _, batch in loader.batches(1, 0, 0)]

    assert of(1) != of(2)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_reading_may_begin_anywhere(first: int) -> None:
    data = Data(DrawData(10), 4)
    loader = Loader(data, train=True, source=0, seed=3, device=CPU)
    rows = torch.cat([batch.data for _, batch in loader.batches(1, 0, first)]).tolist()
    assert rows == loaded(DrawData(10))[4 * first :]


@pytest.mark.parametrize("dataset", [DrawData(10), ManyDraws(10), TensorData(torch.ones(10))])
@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_untouched_between_batches(dataset: Any, workers: int) -> None:
    rng.seed_host(1)
    expected = [draw() for _ in range(2) for draw in DRAWS]
    rng.seed_host(1)
    loader = Loader(Data(dataset, 5, workers=workers), train=True, source=0, seed=3, device=CPU)
    found = []
    for _ in loader.batches(1, 0, 0):
        found += [draw() for draw in DRAWS]
    loader.close()
    assert found == expected


class Fails(IndexData):
    def __init__(self, error: BaseException) -> None:
        super().__init__(8)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.error
        return super().__getitem__(index)


def test_generators_are_put_back_after_an_error() -> None:
    rng.seed_host(1)
    expected = [draw() for draw in DRAWS]
    rng.seed_host(1)
    with pytest.raises(ValueError, match="broken"):
        loaded(Fails(ValueError("broken")))
    assert [draw() for draw in DRAWS] == expected


# --- StopIteration ---


class StopsInList(IndexData):
    def __getitems__(self, indices: list[int]) -> Any:
        raise StopIteration


class StopsInFetch(IndexData):
    def fetch(self, indices: Tensor) -> Any:
        return next(iter(()))


def stops_in_collate(samples: list[Any]) -> Any:
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Fails(StopIteration()), None),
        (StopsInList(8), None),
        (StopsInFetch(8), None),
        (IndexData(8), stops_in_collate),
    ],
    ids=["item", "list", "fetch", "collate"],
)
def test_stop_iteration_is_an_error_and_not_the_end(
    dataset: Any, collate: Any, workers: int
) -> None:
    with pytest.raises(DataError, match="StopIteration"):
        loaded(dataset, collate=collate, workers=workers)
