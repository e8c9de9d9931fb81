"""Recipe mnist1d: its data is the standard split, and it learns."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from phaseloop.recipes.mnist1d import Mnist1D, Mnist1DCNN
from phaseloop.recipes.mnist1d.data import PATH
from tests.recipes import rig

ACCURACY = "test/accuracy"
MEAN, SPREAD = 0.761, 0.018
"""Of the short form's accuracy, over seeds 0 to 4."""

SHORT = ["config=mnist1d", "phases.updates=120"]
TINY = ["config=mnist1d", "phases.updates=12", "model.width=4"]
LIKELIEST = 0.12
"""More than the share of any class in the test split, which one answer for all would get."""

SHA256 = {
    "signals": "bca55dbbe740c33dac48641fb909b26a1e0e4cf33608bba54591d8d54c4a1fcb",
    "labels": "4f5f4160c519e3c47f9d3e196c161336fcd32126a9efffe4153d6e7c8b73f963",
}
"""Of what the generator of mnist1d 0.0.2.post1 makes (make_data.py), in the file's types."""


def test_it_learns(tmp_path: Path) -> None:
    counts = torch.bincount(Mnist1D("test").tensors[1])
    assert float(counts.max() / counts.sum()) < LIKELIEST
    assert rig.final(tmp_path, *SHORT)[ACCURACY] > MEAN - 3 * SPREAD > LIKELIEST


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_at_least_88_percent(tmp_path: Path, seed: int) -> None:
    assert rig.final(tmp_path, "config=mnist1d", f"seed={seed}")[ACCURACY] >= 0.88


def test_it_resumes_exactly(tmp_path: Path) -> None:
    rig.resumes_exactly(tmp_path, *TINY, "hooks.checkpoint.every_updates=5", at=8)


def test_two_processes_test_every_sample(tmp_path: Path) -> None:
    """What they found of the model that they trained, one finds of it too."""
    found = rig.two_processes(tmp_path, *TINY)
    rig.train(tmp_path, *TINY, "only=test", "weights=newest")
    alone = json.loads((tmp_path / "run/test.json").read_text())["metrics"]
    assert found[ACCURACY] == alone[ACCURACY]
    assert found["test/loss"] == pytest.approx(alone["test/loss"], rel=1e-6)


def test_the_split_is_the_standard_one() -> None:
    train, test = Mnist1D("train"), Mnist1D("test")
    assert (len(train), len(test)) == (4000, 1000)
    signals = torch.cat([train.tensors[0], test.tensors[0]])
    assert signals.shape == (5000, 1, 40) and signals.dtype == torch.float32
    # Standardised over both by the generator; a number in half precision is off by 2^-11 of it.
    assert abs(float(signals.mean())) < 1e-3 and float(signals.std()) == pytest.approx(1, abs=1e-3)
    assert torch.bincount(torch.cat([train.tensors[1], test.tensors[1]])).tolist() == [500] * 10
    with np.load(PATH) as file:
        assert {name: hashlib.sha256(file[name].tobytes()).hexdigest() for name in file} == SHA256
        assert torch.equal(signals[:, 0], torch.from_numpy(file["signals"]).float())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="dev"):
        Mnist1D("dev")
    with pytest.raises(ValueError, match="width is 0"):
        Mnist1DCNN(width=0)
