"""Recipe finetune: a few labels, and weights that were learnt without labels, make a classifier."""

from __future__ import annotations

import pytest
import torch

from phaseloop.recipes.digits import Digits
from phaseloop.recipes.finetune import FewLabels
from phaseloop.recipes.ssl import SSLNetwork
from tests.recipes import rig


def test_each_class_has_as_many_and_the_draw_says_which():
    digits = Digits("train")
    for draw in (0, 1):
        few = FewLabels(digits, per_class=7, draw=draw)
        assert len(few) == 70
        assert few.targets.tolist() == [label for label in range(10) for _ in range(7)]
        assert len(set(few.chosen.tolist())) == 70
        assert torch.equal(few.chosen, FewLabels(digits, per_class=7, draw=draw).chosen)
        images, labels = few.fetch(torch.tensor([3, 69]))
        assert labels.tolist() == [0, 9]
        image, label = few[69]
        assert torch.equal(image, images[1]) and label == 9
    other = FewLabels(digits, per_class=7, draw=0).chosen
    assert not torch.equal(few.chosen, other)


def test_nothing_else_draws_or_is_drawn_from():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = FewLabels(Digits("train")).chosen
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(FewLabels(Digits("train")).chosen, first)


def test_a_batch_at_once_only_where_the_dataset_can():
    assert not hasattr(FewLabels(Digits("train", max_shift=1)), "fetch")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_class": 0}, "per_class is 0"),
        ({"draw": -1}, "draw is -1"),
        ({"per_class": 500}, "per_class is 500, but there are 1.. samples of class 0"),
    ],
)
def test_wrong_arguments_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        FewLabels(Digits("train"), **options)
    with pytest.raises(ValueError, match="targets"):
        FewLabels([1, 2])


# --- training ---

SHORT = ["phases.head.updates=20", "phases.top.updates=10", "phases.all.updates=20"]
MEAN, DEVIATION = 0.935, 0.010
"""Of the accuracy after the short form, seeds 0 to 4, of weights from 3 epochs of simclr_digits."""
TINY = ["phases.head.updates=4", "phases.top.updates=3", "phases.all.updates=5",
        "data.train.batch_size=50"]  # fmt: skip


@pytest.fixture
def untrained(tmp_path) -> str:
    """A word for weights of the network that simclr_digits begins with: for exactness they do."""
    torch.manual_seed(0)
    torch.save(SSLNetwork().state_dict(), tmp_path / "untrained.pt")
    return f"model.weights.path={tmp_path / 'untrained.pt'}"


def test_a_killed_run_goes_on_exactly(tmp_path, untrained):
    words = ["config=finetune_digits", untrained, *TINY, "hooks.checkpoint.every_updates=3"]
    rig.resumes_exactly(tmp_path, *words, at=8)  # in the last stage, with a save in each


def test_two_processes(tmp_path, untrained):
    words = ["config=finetune_digits", untrained, *TINY]
    found = rig.two_processes(tmp_path, *words)
    # Batch norms see half of a batch each, so it is another training, but of as many samples.
    hits = found["test/accuracy"] * len(Digits("test"))
    assert abs(hits - round(hits)) < 1e-6


def test_it_learns(tmp_path):
    """The stages; not what pre-training is worth, which so few updates do not show."""
    quiet = ["phases.test_every_epochs=null", "phases.test_at_start=false"]
    rig.final(tmp_path / "before", "config=simclr_digits", "phases.epochs=3", *quiet)
    path = f"model.weights.path={tmp_path / 'before/run'}"
    found = rig.final(tmp_path / "after", "config=finetune_digits", path, *SHORT)
    # Three deviations below the mean; blind guesses come to 0.1.
    assert found["test/accuracy"] >= MEAN - 3 * DEVIATION > 0.1


@pytest.mark.slow
def test_better_than_without_pre_training_by_more_than_the_spread(tmp_path):
    """Both than from scratch, and than from a random backbone whose batch norms know the images."""
    start = ["config=simclr_digits", "phases.test_at_start=false"]
    rig.final(tmp_path / "before", *start)
    rig.final(tmp_path / "random", *start, "phases.epochs=3", "optimizer.lr=0")
    learnt, random = (
        f"model.weights.path={tmp_path / name / 'run'}" for name in ("before", "random")
    )
    forms = {
        "tuned": ["config=finetune_digits", learnt],
        "random": ["config=finetune_digits", random],
        "scratch": ["config=scratch_digits"],
    }
    found = {
        name: [
            rig.final(tmp_path / f"{name}{seed}", *words, f"seed={seed}")["test/accuracy"]
            for seed in range(5)
        ]
        for name, words in forms.items()
    }
    assert min(found["tuned"]) > max(found["scratch"] + found["random"])
