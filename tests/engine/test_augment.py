"""Augment: draws that are a function of the sample alone, and the forms of data they go into."""

from __future__ import annotations

import functools
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from phaseloop import ConfigError, Data, DataError, Draws, Mix, Source, TensorData
from phaseloop.engine import rng
from phaseloop.engine.data import augment
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.stream import StreamLoader

CPU = torch.device("cpu")


def noisy(images: Tensor, draws: Draws) -> Tensor:
    return images + draws.uniform(*images.shape[1:])


def loader(**options: Any) -> Loader:
    options = {"augment": noisy, "batch_size": 8, **options}
    where = {name: options.pop(name) for name in ("rank", "world_size") if name in options}
    dataset = options.pop("dataset", TensorData(torch.zeros(40, 3), torch.arange(40)))
    data = Data(dataset, **options)
    return Loader(data, train=True, source=0, seed=5, device=CPU, **where)


def drawn(one: Loader, epoch: int = 1, roll_backs: int = 0, first: int = 0) -> dict[int, Tensor]:
    """By the sample's target: its input, which is what was drawn."""
    found = {}
    for _, batch in one.batches(epoch, roll_backs, first):
        if batch.weight:
            found.update(dict(zip(batch.target.tolist(), batch.input, strict=True)))
    return found


def same(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_the_hash_is_that_of_the_seeds() -> None:
    keys = augment.sample_keys(123456789, 1000, 5, None)
    begin = rng.mix(123456789, rng.AUGMENT)
    expected = [rng.mix(begin, position) for position in range(1000, 1005)]
    assert [key % 2**64 for key in keys.tolist()] == expected
    numbers = Draws(keys).uniform(7)
    by_hand = [[(rng.mix(key, n) >> 40) * 2.0**-24 for n in range(7)] for key in expected]
    assert numbers.tolist() == by_hand


def test_uniform_is_uniform_and_normal_is_normal() -> None:
    draws = Draws(augment.sample_keys(0, 0, 1000, None))
    uniform = draws.uniform(50).double()
    assert uniform.min() >= 0 and uniform.max() < 1
    # Five standard errors of the mean and of the variance of 50,000.
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 50_000)
    assert abs(uniform.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / 50_000)
    normal = draws.normal(50).double()
    assert abs(normal.mean()) < 5 * math.sqrt(1 / 50_000)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / 50_000)
    # Nothing is drawn twice, and neighbours have nothing to do with each other.
    assert uniform.unique().numel() > 49_800
    assert abs(torch.corrcoef(uniform.T[:2])[0, 1]) < 5 / math.sqrt(1000)
    assert abs(torch.corrcoef(uniform[:2])[0, 1]) < 5 / math.sqrt(50)


def test_draws_go_on_and_scalars_are_one_a_sample() -> None:
    keys = augment.sample_keys(0, 0, 4, None)
    draws = Draws(keys)
    assert draws.uniform().shape == (4,)
    rest = draws.uniform(2, 3)
    assert rest.shape == (4, 2, 3)
    assert torch.equal(rest.flatten(1), Draws(keys).uniform(7)[:, 1:])


def test_how_a_batch_is_cut_and_where_an_epoch_is_entered_change_no_sample() -> None:
    whole = drawn(loader())
    assert same(whole, drawn(loader(micro_batch_size=3)))
    assert same(whole, drawn(loader(batch_size=20)))
    assert same(whole, {**drawn(loader(world_size=3)), **drawn(loader(world_size=3, rank=1)),
                        **drawn(loader(world_size=3, rank=2))})  # fmt: skip
    # Two batches of eight were before it: these samples, and no others, are missing.
    before = [n for _, batch in [*loader().batches(1, 0, 0)][:2] for n in batch.target.tolist()]
    assert same({n: whole[n] for n in whole if n not in before}, drawn(loader(), first=2))
    assert len(before) == 16


def test_epochs_roll_backs_and_samples_differ() -> None:
    found = [drawn(loader()), drawn(loader(), epoch=2), drawn(loader(), roll_backs=1)]
    rows = torch.stack([row for one in found for row in one.values()])
    assert len(rows.unique(dim=0)) == 120


def test_a_sample_that_comes_twice_is_drawn_for_twice() -> None:
    mix = Mix({"a": Source(TensorData(torch.zeros(2, 3), torch.arange(2)))}, epoch_samples=16)
    rows = [row for _, batch in loader(dataset=mix).batches(1, 0, 0) for row in batch.input]
    assert len(torch.stack(rows).unique(dim=0)) == 16


def test_sources_of_a_mix_have_draws_of_their_own() -> None:
    def both(shift: int) -> TensorData:
        return TensorData(torch.zeros(20, 3), torch.arange(20) + shift)

    mix = Mix({"a": Source(both(0)), "b": Source(both(100))})
    found = drawn(loader(dataset=mix))
    assert same(found, drawn(loader(dataset=mix, micro_batch_size=2)))
    assert len(torch.stack([*found.values()]).unique(dim=0)) == len(found)


def test_two_views_are_a_pair_by_other_draws() -> None:
    (_, batch), *_ = loader(views=2).batches(1, 0, 0)
    first, second = batch.input
    assert first.shape == second.shape == (8, 3)
    assert not torch.isclose(first, second).any()
    assert torch.equal(first, next(loader().batches(1, 0, 0))[1].input)


def test_views_without_an_augmentation_are_alike() -> None:
    _, batch = next(loader(views=3, augment=None).batches(1, 0, 0))
    assert len(batch.input) == 3 and all(torch.equal(view, batch.input[0]) for view in batch.input)


def test_augmentations_follow_each_other_in_their_order() -> None:
    given = {"half": lambda x, draws: x + 0.5, "off": None, "twice": lambda x, draws: x * 2}
    _, batch = next(loader(augment=given).batches(1, 0, 0))
    assert torch.equal(batch.input, torch.ones(8, 3))
    _, batch = next(
        loader(augment=list(reversed([*filter(None, given.values())]))).batches(1, 0, 0)
    )
    assert torch.equal(batch.input, torch.full((8, 3), 0.5))


def test_a_run_knows_them_by_name() -> None:
    class Fog:
        def __call__(self, images: Tensor, draws: Draws) -> Tensor:
            return images

    found = augment.names_of({"a": functools.partial(noisy), "off": None, "b": Fog()})
    assert found == ["noisy", "Fog"]


@dataclass
class Pair:
    input: Tensor
    target: Tensor


class Labelled(NamedTuple):
    image: Tensor
    label: Tensor


class Table(UserDict[str, Tensor]):
    """A mapping that is no dict, and knows more than its items."""

    source = "elsewhere"


@pytest.mark.parametrize(
    ("data", "reads"),
    [
        ((torch.zeros(4, 2), torch.ones(4)), lambda new: (new[0], new[1])),
        ([torch.zeros(4, 2), torch.ones(4)], lambda new: (new[0], new[1])),
        (
            {"input": torch.zeros(4, 2), "target": torch.ones(4)},
            lambda n: (n["input"], n["target"]),
        ),
        (Pair(torch.zeros(4, 2), torch.ones(4)), lambda new: (new.input, new.target)),
        (Labelled(torch.zeros(4, 2), torch.ones(4)), lambda new: (new.image, new.label)),
        (
            Table({"input": torch.zeros(4, 2), "target": torch.ones(4)}),
            lambda n: (n["input"], n["target"]),
        ),
        (torch.zeros(4, 2), lambda new: (new["input"], torch.ones(4))),
    ],
    ids=["pair", "list", "mapping", "dataclass", "named", "own", "alone"],
)
def test_the_input_is_found_in_every_form(data: Any, reads: Callable[[Any], Any]) -> None:
    function = augment.chain(noisy, 1, "data.train")
    assert function is not None
    made = function(data, augment.sample_keys(0, 0, 4, None))
    new, target = reads(made)
    assert torch.equal(target, torch.ones(4)) and (new > 0).any()
    before, after = (Batch(one, torch.arange(4), 4).input for one in (data, made))
    assert not before.any()  # what the dataset keeps is left alone
    assert torch.equal(after, new)
    assert type(made) is (dict if isinstance(data, Tensor) else type(data))


def test_what_it_cannot_work_on_is_said() -> None:
    keys = augment.sample_keys(0, 0, 4, None)
    function = augment.chain(noisy, 2, "phases.warm.data.train")
    assert function is not None
    with pytest.raises(DataError, match=r"phases\.warm\.data\.train\.augment: .* torch\.int64"):
        function((torch.zeros(4, dtype=torch.int64), torch.zeros(4)), keys)
    with pytest.raises(DataError, match="5 rows for 4 samples"):
        function((torch.zeros(5, 2), torch.zeros(5)), keys)
    for made, shown in (([1], "list"), (torch.zeros(3, 2), r"\[3, 2\]")):
        broken = augment.chain({"mine": lambda images, draws, made=made: made}, 1, "data.train")
        assert broken is not None
        with pytest.raises(DataError, match=rf"data\.train\.augment\.mine: it gave {shown}, "):
            broken(torch.zeros(4, 2), keys)
    with pytest.raises(ConfigError, match=r"data\.train\.views: 0 is less than 1"):
        augment.chain(None, 0, "data.train")
    with pytest.raises(ConfigError, match=r"data\.train\.augment\.blur: a int cannot be called"):
        augment.chain({"blur": 3}, 1, "data.train")
    dataset = TensorData(torch.zeros(4, 2))
    for option in ({"augment": noisy}, {"views": 2}):
        data = Data(dataset, 2, **option)
        data.open(0, "data.test")
        with pytest.raises(ConfigError, match="it is for training data only"):
            data.check("data.test", train=False)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(3), n) for n in range(20)])


def test_a_stream_is_augmented_by_the_place_in_its_pass() -> None:
    def read(epoch: int, size: int) -> dict[int, Tensor]:
        data = Data(Stream(), 8, augment=noisy, micro_batch_size=size)
        one = StreamLoader(data, train=True, source=0, seed=5, device=CPU)
        return drawn(one, epoch)  # type: ignore[arg-type]

    first = read(1, 8)
    assert same(first, read(1, 3))
    other = read(2, 8)
    assert not any(torch.equal(first[n], other[n]) for n in first)
