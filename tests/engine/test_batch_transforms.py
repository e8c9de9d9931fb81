"""Batch transforms: mixup and cutmix by their formulas, on whole micro-batches of training data."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Accuracy,
    Batch,
    ConfigError,
    CutMix,
    Data,
    DataError,
    MixUp,
    MixUpOrCutMix,
    Phases,
    Task,
    TensorData,
)
from phaseloop.engine.data.loader import Loader
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs.probes import watch
from tests.rigs.r0 import train

CLASSES = 4


def images(count: int = 8, size: int = 6) -> tuple[Tensor, Tensor]:
    """Images [B, 1, H, W] that are filled with their own number, and classes 0, 1, 2, 3, 0 ..."""
    numbers = torch.arange(count, dtype=torch.float32)
    return numbers[:, None, None, None].expand(-1, 1, size, size).clone(), numbers.long() % CLASSES


def seeded(transform: Any, batch: Any, seed: int = 0) -> Any:
    random.seed(seed)
    torch.manual_seed(seed)
    return transform(batch)


def partners(seed: int, count: int = 8) -> Tensor:
    torch.manual_seed(seed)
    return torch.randperm(count)


def test_mixup_is_the_formula() -> None:
    x, y = images()
    mixed, targets = seeded(MixUp(CLASSES, alpha=1.0), (x, y), 3)
    random.seed(3)
    assert random.random() < 1.0  # whether to mix at all
    share = random.betavariate(1.0, 1.0)
    other = partners(3)
    torch.testing.assert_close(mixed, share * x + (1 - share) * x[other])
    hot = torch.eye(CLASSES)
    torch.testing.assert_close(targets, share * hot[y] + (1 - share) * hot[y[other]])
    torch.testing.assert_close(targets.sum(1), torch.ones(8))


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_takes_a_box_and_mixes_targets_by_its_area(seed: int) -> None:
    x, y = images(size=10)
    before = x.clone()
    mixed, targets = seeded(CutMix(CLASSES), (x, y), seed)
    assert torch.equal(x, before)  # a dataset in memory keeps its own
    other = partners(seed)
    hot = torch.eye(CLASSES)
    taken = mixed[:, 0] != x[:, 0]  # where the partner is another image
    for n in range(8):
        if other[n] == n:
            continue
        rows, columns = taken[n].any(1), taken[n].any(0)
        assert torch.equal(taken[n], rows[:, None] & columns[None, :])  # one box
        assert (mixed[n, 0][taken[n]] == float(other[n])).all()
        left = 1 - taken[n].float().mean()
        expected = left * hot[y[n]] + (1 - left) * hot[y[other[n]]]
        torch.testing.assert_close(targets[n], expected)


def test_boxes_of_cutmix_have_the_area_of_the_share() -> None:
    """Uniform shares: with the box cut off at the borders the mean taken is under one half."""
    x, y = images(2, 32)
    transform = CutMix(CLASSES)
    random.seed(0)
    torch.manual_seed(0)
    taken = []
    for _ in range(300):
        mixed, _targets = transform((x, y))
        changed = float((mixed != x).float().mean())
        if changed:
            taken.append(changed)
    assert 0.2 < sum(taken) / len(taken) < 0.5


def test_either_is_chosen_anew() -> None:
    x, y = images()
    transform = MixUpOrCutMix(CLASSES, mixup_alpha=1.0, switch=0.5)
    cut = 0
    for seed in range(100):
        mixed, _targets = seeded(transform, (x, y), seed)
        cut += bool((mixed == mixed.round()).all())  # whole numbers: taken, not blended
    assert 30 < cut < 70
    always = MixUpOrCutMix(CLASSES, switch=1.0)
    mixed, _targets = seeded(always, (x, y))
    assert (mixed == mixed.round()).all()


@pytest.mark.parametrize("transform", [MixUp, CutMix, MixUpOrCutMix])
def test_probability_0_only_makes_the_targets_soft(transform: Any) -> None:
    x, y = images()
    mixed, targets = seeded(transform(CLASSES, probability=0.0), (x, y))
    assert torch.equal(mixed, x)
    assert torch.equal(targets, torch.eye(CLASSES)[y])


def test_mappings_and_soft_targets() -> None:
    x, y = images()
    hot = torch.eye(CLASSES)[y]
    batch = {"input": x, "target": hot, "name": "kept"}
    out = seeded(MixUp(alpha=1.0), batch)
    pair = seeded(MixUp(CLASSES, alpha=1.0), (x, y))
    assert out["name"] == "kept"
    torch.testing.assert_close(out["input"], pair[0])
    torch.testing.assert_close(out["target"], pair[1])
    assert torch.equal(batch["target"], hot)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: MixUp(1), "classes"),
        (lambda: MixUp(2, alpha=0.0), "alpha"),
        (lambda: CutMix(2, probability=1.5), "probability"),
        (lambda: MixUpOrCutMix(2, mixup_alpha=-1.0), "mixup_alpha"),
        (lambda: MixUpOrCutMix(2, cutmix_alpha=float("inf")), "cutmix_alpha"),
        (lambda: MixUpOrCutMix(2, switch=2.0), "switch"),
        (lambda: MixUp()(images()), "classes"),
        (lambda: MixUp(2)(images()), "classes: 2, and there is a target of class 3"),
    ],
)
def test_an_option_out_of_range_is_an_error_with_its_key(make: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.train\.batch_transform\.{key}"):
        make()


@pytest.mark.parametrize(
    ("transform", "batch", "says"),
    [
        (MixUp(2), torch.zeros(3), "a batch must be a pair"),
        (MixUp(2), [torch.zeros(3), "x"], "a batch must be a pair"),
        (MixUp(2), (torch.zeros(3), torch.zeros(3)), "targets must be"),
        (MixUp(2), (torch.zeros(3, dtype=torch.uint8), torch.zeros(3).long()), "floating-point"),
        (CutMix(2), (torch.zeros(3, 4), torch.zeros(3).long()), r"\[B, ..., height, width\]"),
    ],
)
def test_a_batch_that_cannot_be_mixed_is_an_error(transform: Any, batch: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        transform(batch)


# --- in a training ---


class Images(TensorData):
    """The images in memory."""

    def __init__(self, count: int = 8) -> None:
        super().__init__(*images(count))


def batches(workers: int = 0, epoch: int = 1, **options: Any) -> list[Batch]:
    data = Data(Images(), 4, workers=workers, batch_transform=MixUp(CLASSES, alpha=1.0), **options)
    loader = Loader(data, train=True, source=0, seed=0, device=torch.device("cpu"))
    found = [batch for _, batch in loader.batches(epoch, 0, 0)]
    loader.close()
    return found


def equal(one: list[Batch], other: list[Batch]) -> bool:
    return all(torch.equal(a.input, b.input) for a, b in zip(one, other, strict=True))


def test_draws_belong_to_the_micro_batchs_first_position() -> None:
    """So they depend on no worker, and the dataset in memory needs no seeds of its own."""
    assert equal(batches(), batches())
    assert equal(batches(2), batches())
    assert not equal(batches(epoch=2), batches())
    shares = {float(batch.target[batch.target > 0].min()) for batch in batches()}
    assert len(shares) == 2  # each micro-batch has its own


def test_reading_leaves_the_trainings_generators_alone() -> None:
    def draws(transform: Any) -> list[float]:
        probe = watch("on_step", lambda task: float(torch.rand(())))
        train(task(batch_transform=transform), probe=probe)
        return probe.seen

    assert draws(MixUp(CLASSES)) == draws(None)


def task(test: bool = False, **options: Any) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))
    return Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train=Data(Images(), **{"batch_size": 4, **options}),
        test={"test": Data(Images(), 4)} if test else {},
        train_meters={"accuracy": Accuracy(), "top2": Accuracy(2)},
        test_meters={"accuracy": Accuracy()},
        phases=Phases(epochs=1),
    )


def test_only_training_data_is_mixed_and_accuracy_counts_the_largest_class() -> None:
    seen = watch("on_step", lambda task: (task.train, task.batch.target.dim()))
    outcome = train(task(True, batch_transform=MixUp(CLASSES)), seen=seen, sync=MeterSync())
    assert set(seen.seen) == {(True, 2), (False, 1)}
    assert 0 <= outcome.final["train/accuracy"] <= outcome.final["train/top2"] <= 1


def test_accuracy_on_soft_targets() -> None:
    output = torch.eye(3)
    soft = torch.tensor([[0.6, 0.4, 0.0], [0.6, 0.4, 0.0], [0.0, 0.4, 0.6]])
    meter, top2 = Accuracy(), Accuracy(2)
    meter.update(output, soft)
    top2.update(output + torch.tensor([0.5, 0.0, 0.0]), soft)
    assert float(meter.compute()) == pytest.approx(2 / 3)
    assert float(top2.compute()) == 1.0
    with pytest.raises(ConfigError, match=r"meters\.accuracy: .*\[3, 1\].*\[3, 3\]"):
        meter.update(output, torch.zeros(3, 1))


@pytest.mark.parametrize(
    ("options", "pieces"),
    [({}, 0), ({"micro_batch_size": 2}, 2), ({"batch_size": {1: 2, 2: 8}, "accumulate": 4}, 4)],
)
def test_a_batch_in_several_pieces_gets_one_warning(
    options: dict[str, Any], pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    train(task(batch_transform=MixUp(CLASSES), **options))
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [
        f"cut into {pieces} pieces, and data.train.batch_transform" in text for text in found
    ] == [True] * bool(pieces)


def test_none_from_collate_is_not_transformed() -> None:
    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(float(index))

    data = Data(Samples(), 2, collate=lambda samples: None, batch_transform=MixUp(2))
    loader = Loader(data, train=True, source=0, seed=0, device=torch.device("cpu"))
    assert [batch for _, batch in loader.batches(1, 0, 0)] == [None, None]
