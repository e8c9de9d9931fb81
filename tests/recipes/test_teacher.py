"""BYOL and MoCo: their losses by the formulas, the teacher, and the two recipes on digits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Gathered
from phaseloop.recipes.ssl import BYOL, MoCo, TeacherNetwork
from tests.recipes import rig

FEW_LABEL = "test/probe/few_label"

TINY = ["phases.updates=12", "data.train.limit=96", "data.train.batch_size=16",
        "data.test.dataset.bank.split=test", "model.widths=[4,8]"]  # fmt: skip


def pairs(rows: int, dim: int = 3, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Predictions and targets of two views, float64 [rows, dim]."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, rows, dim, generator=generator, dtype=torch.float64)
    return (
        {"prediction": parts[0], "target": parts[1]},
        {"prediction": parts[2], "target": parts[3]},
    )


def alone(own: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Gathered:
    return Gathered(*own, 0)


def angle(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


# --- the losses ---


def test_byol_is_the_squared_distance_of_unit_vectors_over_both_views():
    first, second = pairs(4)

    def unit(rows: Tensor) -> Tensor:
        return rows / rows.norm(dim=1, keepdim=True)

    across = (unit(first["prediction"]) - unit(second["target"])).square().sum(dim=1)
    back = (unit(second["prediction"]) - unit(first["target"])).square().sum(dim=1)
    found = BYOL()((first, second), alone((first, second)))
    assert float(found) == pytest.approx(float((across + back).mean() / 2), rel=1e-12)


def test_moco_by_its_formula_and_the_queue_in_its_order():
    t, size = 0.2, 5
    moco = MoCo(size, 3, t).double()
    queue: list[Tensor] = [torch.zeros(3, dtype=torch.float64)] * size
    for seed in range(3):  # two rows, both views: four keys a batch
        own = pairs(2, seed=seed)
        losses = []
        for here, there in (own, own[::-1]):
            for q, k in zip(here["prediction"], there["target"], strict=True):
                unit = q / q.norm()
                others = [math.exp(float(unit @ old) / t) for old in queue]
                right = math.exp(angle(q, k) / t)
                losses.append(-math.log(right / (right + sum(others))))
        assert float(moco(own, alone(own))) == pytest.approx(sum(losses) / 4, rel=1e-9)
        newest = [k / k.norm() for view in own for k in view["target"]]
        queue = (newest + queue)[:size]
        torch.testing.assert_close(moco.queue, torch.stack(queue))


def test_a_batch_that_is_not_finite_spoils_no_later_loss():
    moco = MoCo(16, 3).double()
    bad = pairs(2)
    bad[0]["target"][1] = math.nan
    assert math.isnan(float(moco(bad, alone(bad))))
    # Newest first: the first view's keys, then the second's.
    assert moco.queue[1].count_nonzero() == 0 and all(moco.queue[[0, 2, 3]].norm(dim=1) > 0.99)
    good = pairs(2, seed=1)
    assert math.isfinite(float(moco(good, alone(good))))


@pytest.mark.parametrize("make", [BYOL, lambda: MoCo(8, 3).double()])
def test_the_mean_of_the_processes_is_the_loss_of_one(make):
    """Each has its own rows and all targets; uneven shares are weighted by their samples."""
    whole = pairs(5)
    first, second = ([{n: rows[a:b] for n, rows in view.items()} for view in whole]
                     for a, b in ((0, 2), (2, 5)))  # fmt: skip
    one = make()
    expected = float(one(whole, alone(whole)))
    losses, queues = [], []
    for share, start in ((first, 0), (second, 2)):
        criterion = make()
        losses.append(float(criterion(tuple(share), Gathered(*whole, start))))
        queues.append(getattr(criterion, "queue", None))
    assert (2 * losses[0] + 3 * losses[1]) / 5 == pytest.approx(expected, rel=1e-12)
    for queue in queues:
        assert queue is None or torch.equal(queue, one.queue)


@pytest.mark.parametrize("criterion", [BYOL(), MoCo(8, 3).double()])
def test_no_rows_are_a_loss_of_zero(criterion):
    nothing = tuple({name: rows[:0] for name, rows in view.items()} for view in pairs(2))
    assert float(criterion(nothing, alone(pairs(2)))) == 0


def test_gradients_reach_the_network_and_not_the_queue():
    moco = MoCo(4, 3).double()
    for _ in range(2):  # the second time there is something in the queue
        own = pairs(3)
        own[0]["prediction"].requires_grad_(True)
        moco(own, alone(own)).backward()
        assert own[0]["prediction"].grad.abs().sum() > 0
    assert not moco.queue.requires_grad


@pytest.mark.parametrize(
    ("options", "problem"),
    [((0, 3), "size is 0"), ((4, 0), "dim is 0"), ((4, 3, 0.0), "temperature is 0.0")],
)
def test_wrong_options_are_named(options, problem):
    with pytest.raises(ValueError, match=problem):
        MoCo(*options)


# --- the network ---


def test_the_teacher_is_a_copy_without_gradients_that_goes_by_the_batch():
    torch.manual_seed(0)
    model = TeacherNetwork(widths=[4], projection=[8, 3], prediction=None)
    images = torch.rand(6, 1, 8, 8)
    given = model(images)
    # The copy sees the same batch by the same norms.
    assert torch.equal(given["prediction"], given["target"])
    assert given["prediction"].requires_grad and not given["target"].requires_grad
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    names = dict(model.named_parameters())
    followed = {name.removeprefix("teacher.") for name in names if name.startswith("teacher.")}
    assert followed and followed <= set(names)
    assert model(images, output="features").shape == (6, 4)
    assert model(images, output="projection").shape == (6, 3)


def test_the_prediction_is_as_wide_as_what_it_predicts():
    assert isinstance(TeacherNetwork(prediction=None).prediction, nn.Identity)
    with pytest.raises(ValueError, match=r"prediction is \[8, 5\], but must end with 64"):
        TeacherNetwork(prediction=[8, 5])


# --- the recipes ---

UPDATES = {"byol": 230, "moco": 92}
"""Of the short form: ten epochs, and four."""
LEARNED = {"byol": (0.694, 0.025), "moco": (0.722, 0.005)}
"""Accuracy with one label of each class, in the mean of 20 draws, after the short form: mean and
standard deviation over seeds 0 to 2. It tells more than ten labels of each class do."""
UNTRAINED = 0.601
"""The most of seeds 0 to 2 at rate 0, whose batch norms have seen the images."""


def short(name: str, updates: int | None = None) -> list[str]:
    updates = updates or UPDATES[name]
    return [f"config={name}_digits", f"phases.updates={updates}", "phases.test_every_epochs=null",
            f"phases.test_every_updates={updates}", "phases.test_at_start=false",
            "meters.test.probe={linear: null, knn: null, few_label: {per_class: 1, draws: 20}}",
            "hooks.checkpoint.metric=null",
            "hooks.checkpoint.keep_best=0"]  # fmt: skip


def least(name: str) -> float:
    mean, spread = LEARNED[name]
    return mean - 3 * spread


@pytest.mark.parametrize("name", ["byol", "moco"])
def test_it_learns(tmp_path: Path, name: str) -> None:
    assert rig.final(tmp_path, *short(name))[FEW_LABEL] > least(name) > UNTRAINED


@pytest.mark.parametrize(
    ("name", "word", "updates"),
    [
        # The weights stay, however many updates there are.
        ("byol", "optimizer.lr=0", 46),
        ("moco", "data.train.augment={affine: null}", None),
    ],
    ids=["at rate 0", "of views that are alike"],
)
def test_it_does_not_learn(tmp_path: Path, name: str, word: str, updates: int | None) -> None:
    assert rig.final(tmp_path, *short(name, updates), word)[FEW_LABEL] < least(name)


@pytest.mark.parametrize("name", ["byol", "moco"])
def test_it_resumes_exactly(tmp_path: Path, name: str) -> None:
    """The teacher and the queue too."""
    words = [f"config={name}_digits", *TINY, "hooks.checkpoint.every_updates=3"]
    rig.resumes_exactly(tmp_path, *words, at=8)


@pytest.mark.parametrize("name", ["byol", "moco"])
def test_two_processes(tmp_path: Path, name: str) -> None:
    """Batch norms see other batches, so it is another training; but all of it is there."""
    found = rig.two_processes(tmp_path, f"config={name}_digits", *TINY)
    assert 0.3 < found[FEW_LABEL] <= 1  # chance is 0.1
    # All 359 queries were asked, each once: the share is a whole number of them.
    hits = found["test/probe/knn"] * 359
    assert abs(hits - round(hits)) < 1e-9
