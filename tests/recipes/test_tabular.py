"""Recipe tabular: numbers in their own units go in and come out, and it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phaseloop.recipes.tabular import Diabetes, StandardMSE, TabularMLP
from phaseloop.recipes.tabular.data import statistics
from tests.recipes import rig

R2 = "test/r2"
MEAN, SPREAD = 0.496, 0.021
"""Of R2 over seeds 0 to 4."""

TINY = ["config=tabular", "phases.updates=30", "model.hidden=4"]


def least_squares() -> float:
    """R2 on the test split of the best linear function of the training split."""
    (x, y), (test_x, test_y) = (
        (t.double().numpy() for t in Diabetes(split).tensors) for split in ("train", "test")
    )
    weights = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    errors = np.c_[test_x, np.ones(len(test_x))] @ weights - test_y
    return float(1 - (errors**2).sum() / ((test_y - test_y.mean()) ** 2).sum())


def test_it_learns(tmp_path: Path) -> None:
    """0 is the mean of the test targets for all; least squares get 0.49."""
    found = rig.final(tmp_path, "config=tabular")[R2]
    assert found > MEAN - 3 * SPREAD > 0.8 * least_squares() > 0


def test_it_resumes_exactly(tmp_path: Path) -> None:
    rig.resumes_exactly(tmp_path, *TINY, "hooks.checkpoint.every_updates=5", at=18)


def test_two_processes_find_the_same(tmp_path: Path) -> None:
    """Without dropout, which each process draws for itself, it is one training."""
    words = [*TINY, "model.dropout=0"]
    alone = rig.final(tmp_path / "one", *words)
    both = rig.two_processes(tmp_path / "two", *words)
    for name in (R2, "test/mae", "test/loss"):
        assert both[name] == pytest.approx(alone[name], rel=1e-4), name


# --- the units ---


def test_the_statistics_know_nothing_of_the_test_split() -> None:
    features, targets = (tensor.double() for tensor in Diabetes("train").tensors)
    known = statistics()
    standard = (features - known.mean) / known.spread
    torch.testing.assert_close(standard.mean(dim=0), torch.zeros(10).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(standard.square().mean(dim=0), torch.ones(10).double())
    assert float(known.target_mean) == pytest.approx(float(targets.mean()))
    assert float(known.target_spread) == pytest.approx(float(targets.std(correction=0)))


def test_the_statistics_go_with_the_model() -> None:
    """Others' weights bring others' units, and the loss is that of standardised targets."""
    model = TabularMLP().eval()
    x, y = (tensor[:7] for tensor in Diabetes("test").tensors)
    inner = model.layers((x - model.mean) / model.spread).squeeze(1)
    torch.testing.assert_close(model(x), model.target_mean + model.target_spread * inner)

    state = model.state_dict()
    moved = TabularMLP().eval()
    moved.load_state_dict({**state, "target_mean": state["target_mean"] + 5})
    torch.testing.assert_close(moved(x), model(x) + 5)

    standard = (y - model.target_mean) / model.target_spread
    expected = torch.nn.functional.mse_loss(inner, standard)
    torch.testing.assert_close(StandardMSE()(model(x), y), expected)


def test_a_gradient_does_not_depend_on_the_units() -> None:
    """As large as with standardised targets: not 77 or 77 squared times as large."""
    model = TabularMLP()
    x, y = Diabetes("train").tensors
    StandardMSE()(model(x), y).backward()
    found = model.layers[3].bias.grad.clone()
    model.zero_grad()
    inner = model.layers((x - model.mean) / model.spread).squeeze(1)
    ((inner - (y - model.target_mean) / model.target_spread) ** 2).mean().backward()
    torch.testing.assert_close(found, model.layers[3].bias.grad, rtol=1e-3, atol=1e-5)


def test_the_split_is_whole() -> None:
    assert (len(Diabetes("train")), len(Diabetes("test"))) == (354, 88)
    features, targets = Diabetes("test")[0]
    assert features.shape == (10,) and targets.shape == ()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="dev"):
        Diabetes("dev")
    with pytest.raises(ValueError, match="hidden is 0"):
        TabularMLP(hidden=0)
