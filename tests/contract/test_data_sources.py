"""DATA and RES by all that training data may be: mixes, samplers, limits, datasets made again."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Batch,
    ConfigError,
    Data,
    DataError,
    Debug,
    Mix,
    MixUp,
    Phases,
    Sampler,
    Source,
    Task,
    TensorData,
)
from phaseloop.engine.data.loader import Loader
from tests.contract.test_res import finish, go, ids_of_epoch
from tests.rigs import r1
from tests.rigs.equal import assert_eq, probe_of, undisturbed
from tests.rigs.probes import DrawData, IndexData, watch
from tests.rigs.r0 import r0, train
from tests.rigs.r1 import At

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")


class Draws(DrawData):
    """Draws, with a class and a weight for each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.targets = [n % 3 for n in range(samples)]
        self.weights = [1.0 + n % 4 for n in range(samples)]


def redrawn(epoch: int) -> Draws:
    return Draws(13)


def sets(kind: str) -> Any:
    """A dataset with options of ``Data`` that say what an epoch draws."""
    mix = {"a": Source(Draws(8), 2.0), "b": Source(Draws(5)), "c": Source(Draws(9), limit=3)}
    return {
        "mix": (Mix(mix), {}),
        "long mix": (Mix(mix, epoch_samples=31), {}),
        "balanced": (Draws(13), {"sampler": Sampler("balanced")}),
        "weighted": (Draws(13), {"sampler": Sampler("weighted", samples=17)}),
        "limit": (Draws(13), {"limit": 9}),
        "limited sampler": (Draws(13), {"limit": 0.7, "sampler": Sampler("balanced")}),
        "rebuilt": (redrawn, {"rebuild_every": 2}),
    }[kind]


KINDS = ["mix", "long mix", "balanced", "weighted", "limit", "limited sampler", "rebuilt"]


def read(
    kind: str, epochs: int = 3, world: int = 1, first: int = 0, seed: int = 3, **options: Any
) -> list[list[tuple[Any, ...]]]:
    """Per epoch, in order: source and index of each sample, and its draws; over all processes."""
    dataset, more = sets(kind)
    loaders = [
        Loader(
            Data(dataset, **{"batch_size": 6, **more, **options}),
            train=True, source=0, seed=seed, device=CPU, world_size=world, rank=rank,
        )
        for rank in range(world)
    ]  # fmt: skip
    seen: list[list[tuple[Any, ...]]] = []
    for epoch in range(1, epochs + 1):
        windows: dict[int, list[tuple[Any, ...]]] = {}
        for loader in loaders:
            number = first
            previous = None
            for window, batch in loader.batches(epoch, 0, first):
                number += previous is not None and window is not previous
                previous = window
                if batch.weight:
                    windows.setdefault(number, []).extend(samples_of(batch))
        seen.append([sample for number in sorted(windows) for sample in windows[number]])
        for loader in loaders:
            loader.close() if epoch == epochs else None
    return seen


def samples_of(batch: Batch) -> list[tuple[Any, ...]]:
    sources = [None] * batch.size if batch.sources is None else batch.sources.tolist()
    draws = [tuple(row) for row in batch.data.tolist()]
    return list(zip(sources, batch.indices.tolist(), draws, strict=True))


# --- DATA-a ---


@pytest.mark.parametrize("kind", KINDS)
def test_data_a_samples_and_draws_do_not_depend_on_workers_processes_or_micro_batches(
    kind: str,
) -> None:
    whole = read(kind)
    assert read(kind, workers=2) == whole
    for world in (2, 3):
        assert read(kind, world=world) == whole
        assert read(kind, world=world, micro_batch_size=1) == whole
    assert read(kind, micro_batch_size=4) == whole
    assert read(kind, accumulate=5) == whole
    assert read(kind, batch_size=100) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_data_a_every_sample_and_epoch_draws_anew(kind: str) -> None:
    seen = read(kind)
    draws = [draw for epoch in seen for sample in epoch for draw in sample[2]]
    assert len(set(draws)) == len(draws)
    orders = [[sample[:2] for sample in epoch] for epoch in seen]
    assert orders[0] != orders[1] != orders[2]
    assert [[s[:2] for s in epoch] for epoch in read(kind, seed=4)] != orders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_data_a_an_epoch_is_entered_anywhere(kind: str, workers: int) -> None:
    whole = read(kind)
    rest = read(kind, first=1, workers=workers)
    assert rest == [epoch[6:] for epoch in whole]


def test_data_a_the_same_sample_of_two_sources_draws_differently() -> None:
    mix = Mix({"a": Draws(1), "b": Draws(1)}, epoch_samples=8)
    loader = Loader(Data(mix, 8), train=True, source=0, seed=0, device=CPU)
    ((_, batch),) = loader.batches(1, 0, 0)
    assert set(batch.sources.tolist()) == {0, 1}
    assert batch.indices.tolist() == [0] * 8
    assert len({tuple(row) for row in batch.data.tolist()}) == 8


def test_data_a_a_sample_of_the_first_source_draws_as_it_would_alone() -> None:
    """The seed of a sample is that of (source, epoch, position)."""
    mixed = Loader(Data(Mix({"a": Draws(4)}), 4), train=True, source=0, seed=0, device=CPU)
    alone = Loader(Data(Draws(4), 4), train=True, source=0, seed=0, device=CPU)
    ((_, one),), ((_, other),) = mixed.batches(2, 0, 0), alone.batches(2, 0, 0)
    assert torch.equal(one.data, other.data)
    # The same positions, all of the second source.
    second = Mix({"a": Source(Draws(4), 1e-12), "b": Draws(4)}, epoch_samples=4)
    loader = Loader(Data(second, 4), train=True, source=0, seed=0, device=CPU)
    ((_, third),) = loader.batches(2, 0, 0)
    assert third.sources.tolist() == [1] * 4
    assert not (third.data == other.data).any()


class Lists:
    """Gives lists of samples, and has no other way."""

    def __len__(self) -> int:
        return 5

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.tensor(100 + index) for index in indices]


def test_a_mix_reads_every_form_of_dataset() -> None:
    in_memory = TensorData(torch.arange(10, 16))
    for sources in (
        {"a": in_memory, "b": TensorData(torch.arange(100, 105))},  # by fetch
        {"a": in_memory, "b": Lists()},
    ):
        loader = Loader(Data(Mix(sources), 11), train=True, source=0, seed=0, device=CPU)
        ((_, batch),) = loader.batches(1, 0, 0)
        start = torch.tensor([10, 100])[batch.sources]
        assert batch.data.tolist() == (start + batch.indices).tolist()
        assert set(batch.sources.tolist()) == {0, 1}


def test_a_mix_put_together_from_batches_keeps_pairs_together() -> None:
    pairs = [TensorData(torch.arange(n), torch.arange(n) + 50) for n in (6, 4)]
    loader = Loader(Data(Mix({"a": pairs[0], "b": pairs[1]}), 10), train=True, source=0, seed=0,
                    device=CPU)  # fmt: skip
    ((_, batch),) = loader.batches(1, 0, 0)
    assert torch.equal(batch.input, batch.indices)
    assert torch.equal(batch.target, batch.input + 50)


def test_sources_of_different_forms_are_an_error() -> None:
    one, two = TensorData(torch.zeros(4)), TensorData(torch.zeros(4), torch.zeros(4))
    with pytest.raises(DataError, match="different forms"):
        train(r0([0], 1, train=Data(Mix({"a": one, "b": two}), 8)))


# --- limits ---


def test_a_limit_leaves_the_same_random_part_in_every_epoch() -> None:
    def ids(**options: Any) -> list[list[int]]:
        data = Data(IndexData(40), 8, **options)
        seed = options.pop("seed", 0)
        loader = Loader(data, train=True, source=0, seed=seed, device=CPU)
        return [[int(i) for _, b in loader.batches(e, 0, 0) for i in b.indices] for e in (1, 2)]

    first, second = ids(limit=10)
    assert len(set(first)) == 10
    assert sorted(first) == sorted(second)
    assert first != second
    assert sorted(first) != list(range(10))  # not the first ten
    assert [len(epoch) for epoch in ids(limit=0.25)] == [10, 10]
    assert sorted(ids(limit=0.25)[0]) == sorted(first)
    assert ids(limit=40)[0] == ids()[0]
    assert ids(limit=1.0)[0] == ids()[0]
    assert [len(epoch) for epoch in ids(limit=0.001)] == [1, 1]


def test_a_limited_test_set_is_read_in_its_order_and_draws_as_the_whole_does() -> None:
    def samples(limit: int | None) -> dict[int, Any]:
        data = Data(DrawData(20), 4, limit=limit)
        loader = Loader(data, train=False, source=0, seed=0, device=CPU)
        return {s[1]: s[2] for _, batch in loader.batches(1, 0, 0) for s in samples_of(batch)}

    part, whole = samples(6), samples(None)
    assert len(part) == 6
    assert list(part) == sorted(part) != list(range(6))
    assert all(whole[index] == draws for index, draws in part.items())


# --- DATA-d ---


@pytest.mark.parametrize("kind", ["mix", "balanced", "batch transform", "rebuilt", "sizes"])
def test_data_d_testing_changes_nothing_of_what_is_drawn(kind: str) -> None:
    def trace(**options: Any) -> Any:
        data = Data(Points(), {1: 4, 2: 8}) if kind == "sizes" else DRAWN[kind]()
        task = r1.make_task(None, train=data, epochs=3, **options)
        probe = watch(
            "on_step",
            lambda task: (task.batch.indices.tolist(), float(task.loss)) if task.train else None,
        )
        train(task, probe=probe)
        state = {name: value.tolist() for name, value in task.bare_model.state_dict().items()}
        return [entry for entry in probe.seen if entry is not None], state

    often = trace(test=("a", "b"), phases={"test_every_updates": 3})
    assert often == trace(phases={"test_every_epochs": None})


def test_one_set_of_data_may_be_trained_on_and_tested() -> None:
    data = Data(Points(8), 4, drop_last=False)
    assert train(r1.make_task(None, train=data, epochs=1, test=False)).updates == 2
    task = Task(
        model=r1.network(), criterion=nn.CrossEntropyLoss(), phases=Phases(epochs=1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), train=data, test=data,
    )  # fmt: skip
    assert train(task).updates == 2
    only_train = Data(Points(8), 4, sampler=Sampler("balanced"))
    with pytest.raises(ConfigError, match=r"data\.test\.sampler: .*training data only"):
        Task(model=r1.network(), phases=Phases(epochs=1), train=only_train, test=only_train)


# --- RES-a ---


class Points(r1.Samples):
    """R1's samples with weights."""

    def __init__(self, count: int = r1.SAMPLES) -> None:
        super().__init__(count, augment=True)
        self.targets = self.y.tolist()


class Shifted(Points):
    """Moved by an amount that the epoch it is made for draws."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.x = self.x + torch.rand(4) + 0.1 * epoch + random.random() + np.random.rand()


def mixup_dicts(batch: dict[str, Any]) -> dict[str, Any]:
    mixed: dict[str, Any] = MixUp(classes=2)(batch)
    return mixed


def mix_of_two() -> Mix:
    return Mix({"a": Source(Points(25), 2.0), "b": Points(40)}, epoch_samples=40)


DRAWN: dict[str, Any] = {
    "mix": lambda: Data(mix_of_two(), 4),
    "mix, two workers": lambda: Data(mix_of_two(), 4, workers=2, micro_batch_size=3),
    "balanced": lambda: Data(Points(), 4, sampler=Sampler("balanced", per_class=20)),
    "limit": lambda: Data(Points(57), 4, limit=40),
    "batch transform": lambda: Data(Points(), 4, batch_transform=mixup_dicts),
    "rebuilt": lambda: Data(Shifted, 4, rebuild_every=2),
    "rebuilt, two workers": lambda: Data(Shifted, 4, rebuild_every=1, workers=2),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_res_a_whatever_an_epoch_draws(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"train": DRAWN[kind](), "save": {"every_updates": 5}}
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 17), **options).code == -signal.SIGKILL
    finish(folder, **options)
    assert ids_of_epoch(folder, 3) == ids_of_epoch(undisturbed(**options), 3)
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize("at", [9, 10, 13, 15, 17])
def test_res_a_batch_sizes_by_epoch(tmp_path: Path, at: int) -> None:
    """Epochs of 10, 5 and 2 updates; stopped in each, and at their ends."""
    options: dict[str, Any] = {
        "train": Data(Points(), {1: 4, 2: 8, 3: 20}),
        "schedule": r1.Plan("warmup_cosine"),
    }
    folder = tmp_path / "run"
    assert go(folder, At("on_step", at, signal.SIGTERM), **options).value["updates"] == at
    finish(folder, **options)
    made = [line["epoch"] for line in r1.lines(probe_of(folder), "update")]
    assert made == [1] * 10 + [2] * 5 + [3] * 2
    assert_eq(undisturbed(**options), folder)


def test_res_a_overfitting_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": Data(Points(), 4), "debug": Debug(overfit=3)}
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 5, signal.SIGTERM), **options).value["updates"] == 5
    finish(folder, **options)
    orders = [ids_of_epoch(folder, epoch) for epoch in (1, 2, 3)]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == 12
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize(
    "other",
    [
        {"train": Data(Points(), 4, limit=20)},
        {"train": Data(Points(), 4, sampler=Sampler("balanced"))},
        {"train": Data(Points(), {1: 4, 2: 8})},
        {"train": Data(Mix({"a": Points()}), 4)},
        {"train": Data(Points(), 4, batch_transform=mixup_dicts)},
        {"train": Data(Points(), 4), "debug": Debug(overfit=2)},
    ],
    ids=["limit", "sampler", "sizes", "mix", "transform", "overfit"],
)
def test_another_drawing_is_another_training(tmp_path: Path, other: dict[str, Any]) -> None:
    from phaseloop.hooks.checkpoint import Checkpoint

    train(r1.make_task(tmp_path, train=Data(Points(), 4), epochs=1), save=Checkpoint())
    with pytest.raises(ConfigError, match=r"run\.dir: .*another configuration"):
        train(r1.make_task(tmp_path, epochs=2, **other), save=Checkpoint())
