"""Losses of recipe ssl: each against its formula, written out for single samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phaseloop import Gathered
from phaseloop.recipes.ssl import NTXent, SSLNetwork, VICReg

ROWS, WIDTH = 5, 3


def views(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return first, first + torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def nt_xent(first: Tensor, second: Tensor, t: float) -> list[float]:
    """Equation 1 of SimCLR for each of the 2N views."""
    z = torch.cat([first, second])
    losses = []
    for i in range(len(z)):
        j = (i + len(first)) % len(z)
        s = [float(F.cosine_similarity(z[i], z[k], dim=0)) / t for k in range(len(z))]
        others = sum(math.exp(s[k]) for k in range(len(z)) if k != i)
        losses.append(-math.log(math.exp(s[j]) / others))
    return losses


@pytest.mark.parametrize("t", [0.5, 0.1])
def test_nt_xent_is_its_formula(t: float) -> None:
    first, second = views()
    losses = nt_xent(first, second, t)
    found = NTXent(t)((first, second), Gathered(first, second, 0))
    assert float(found) == pytest.approx(sum(losses) / (2 * ROWS), abs=1e-12)
    # Of three rows of its own, from number 2 on: the same formula, over all others.
    own = (first[2:], second[2:])
    mine = [losses[i] for i in (2, 3, 4, 7, 8, 9)]
    found = NTXent(t)(own, Gathered(first, second, 2))
    assert float(found) == pytest.approx(sum(mine) / 6, abs=1e-12)


def test_nt_xent_of_no_rows_is_nought_and_has_a_gradient() -> None:
    first, second = (view.requires_grad_() for view in views())
    loss = NTXent()((first[:0], second[:0]), Gathered(first, second, ROWS))
    loss.backward()
    assert loss.item() == 0 and first.grad.abs().max().item() == 0


def vicreg(first: Tensor, second: Tensor) -> dict[str, float]:
    """Equations 1 to 4 of VICReg, by single numbers."""
    parts = {"invariance": 0.0, "variance": 0.0, "covariance": 0.0}
    for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True):
        parts["invariance"] += (a - b) ** 2 / (ROWS * WIDTH)
    for z in (first, second):
        columns = z.T.tolist()
        means = [sum(column) / ROWS for column in columns]
        for i in range(WIDTH):
            for j in range(WIDTH):
                shared = sum(
                    (x - means[i]) * (y - means[j])
                    for x, y in zip(columns[i], columns[j], strict=True)
                ) / (ROWS - 1)
                if i == j:
                    parts["variance"] += max(0, 1 - math.sqrt(shared + 1e-4)) / WIDTH / 2
                else:
                    parts["covariance"] += shared**2 / WIDTH
    return parts


def test_vicreg_is_its_formula() -> None:
    first, second = (view / 2 for view in views())  # so that some deviations are below 1
    expected = vicreg(first, second)
    assert all(part > 0.01 for part in expected.values())
    found = VICReg()((first, second), Gathered(first, second, 0))
    weights = {"invariance": 25, "variance": 25, "covariance": 1}
    for name, part in expected.items():
        assert float(found[name]) == pytest.approx(weights[name] * part, abs=1e-12)


def test_vicreg_of_one_sample_is_finite() -> None:
    first, second = (view.requires_grad_() for view in views(1))
    loss = sum(VICReg()((first, second), Gathered(first, second, 0)).values())
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(first.grad).all()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: NTXent(0.0), "temperature is 0.0"),
        (lambda: VICReg(variance=-1.0), "variance is -1.0"),
        (lambda: SSLNetwork(widths=[]), r"widths is \[\]"),
        (lambda: SSLNetwork(pool=0), "pool is 0"),
        (lambda: SSLNetwork(projection=[0]), r"projection is \[0\]"),
        (lambda: SSLNetwork(projection=None), "this model has features"),
        (lambda: SSLNetwork(output="logits"), "this model has features, projection"),
        (lambda: SSLNetwork()(torch.zeros(2, 1, 8, 8), output="logit"), "output is 'logit'"),
    ],
)
def test_wrong_options_are_named(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


def test_a_model_gives_what_is_asked() -> None:
    model = SSLNetwork(widths=[4, 6], pool=2, projection=[5, 3], classes=7)
    images = torch.zeros(2, 1, 8, 8)
    widths = {"features": 6 * 2 * 2, "projection": 3, "logits": 7}
    assert {name: model(images, output=name).shape[1] for name in widths} == widths
    assert model(images).shape == (2, 3)
    assert SSLNetwork(projection=None, classes=7, output="logits")(images).shape == (2, 7)
