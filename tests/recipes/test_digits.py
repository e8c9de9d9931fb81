"""Recipe digits: its data is what it says, and it learns."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch

from phaseloop.recipes.digits import Digits, DigitsCNN
from phaseloop.tools.run import run
from tests.rigs import ranks

IMAGES = 1797  # of the UCI set that scikit-learn ships


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_at_least_98_percent(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    quiet = ["hooks.console=null", "hooks.progress=null", "hooks.tensorboard=null"]
    assert run(["config=digits", f"seed={seed}", *quiet]) == 0
    status = json.loads((tmp_path / "runs/digits/status.json").read_text())
    assert status["status"] == "finished"
    # The last test, not the best: nothing was chosen by looking at the test set.
    assert status["final"]["test/accuracy"] >= 0.98


def test_two_processes_learn_as_much_and_test_as_many(tmp_path):
    ended = ranks.run(in_folder, str(tmp_path))
    assert [one.code for one in ended] == [0, 0], [one.output for one in ended]
    final = json.loads((tmp_path / "runs/digits/status.json").read_text())["final"]
    assert final["test/accuracy"] >= 0.98
    # Every image counted once: the share of 359 is a whole number of them.
    hits = final["test/accuracy"] * len(Digits("test"))
    assert abs(hits - round(hits)) < 1e-9


def in_folder(folder: str) -> None:
    """What each of several processes does."""
    os.chdir(folder)
    raise SystemExit(run(["config=digits", "hooks.tensorboard=null"]))


def test_the_split_is_whole_and_stratified():
    train, test = Digits("train"), Digits("test")
    assert len(train) + len(test) == IMAGES
    counts = [torch.bincount(d.fetch(torch.arange(len(d)))[1], minlength=10) for d in (train, test)]
    for of_train, of_test in zip(*counts, strict=True):
        # A fifth of each class, to the nearest whole image.
        assert abs(int(of_test) - int(of_train + of_test) / 5) <= 0.5


def test_samples_and_batches_agree():
    plain = Digits("test")
    images, labels = plain.fetch(torch.arange(5))
    assert images.shape == (5, 1, 8, 8) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    for index in range(5):
        image, label = plain[index]
        assert torch.equal(image, images[index]) and int(label) == int(labels[index])


def test_shifts_come_from_pythons_generator():
    shifted, plain = Digits("train", max_shift=1), Digits("train")
    random.seed(0)
    seen = [shifted[3][0] for _ in range(40)]
    random.seed(0)
    assert all(torch.equal(a, shifted[3][0]) for a in seen)
    # Nine places to stand, one of them the middle.
    distinct = {tuple(image.flatten().tolist()) for image in seen}
    assert 1 < len(distinct) <= 9
    assert any(torch.equal(image, plain[3][0]) for image in seen)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="trian"):
        Digits("trian")
    with pytest.raises(ValueError, match="max_shift"):
        Digits("train", max_shift=-1)


def test_the_model_is_small():
    assert DigitsCNN()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert sum(p.numel() for p in DigitsCNN().parameters()) < 20_000
