"""LARS against its formula, one parameter and one number at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import LARS, ConfigError
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, probe_of, undisturbed
from tests.rigs.r1 import At

SHAPES = [(3, 4), (4,), (), (2, 3, 2), (1, 1)]


def slow(w: list[float], g: list[float], v: list[float], plain: bool, o: dict[str, Any]) -> None:
    """The formula of the docstring, in place."""
    size, slope = (math.sqrt(sum(x * x for x in xs)) for xs in (w, g))
    b = 0.0 if plain else o["weight_decay"]
    rate = o["lr"]
    if not plain and size > 0 and slope > 0:
        local = o["trust"] * size / (slope + b * size + 1e-8)
        rate = min(local, o["lr"]) if o["clip"] else o["lr"] * local
    for i in range(len(w)):
        step = rate * (g[i] + b * w[i])
        v[i] = o["momentum"] * v[i] + step
        w[i] -= o["momentum"] * v[i] + step if o["nesterov"] else v[i]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_lars_is_its_formula(momentum: float, nesterov: bool, clip: bool, exclude: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    parameters = [nn.Parameter(draw(shape)) for shape in SHAPES]
    parameters[-1].data.zero_()  # its size is 0
    options: dict[str, Any] = {
        "lr": 0.3, "momentum": momentum, "weight_decay": 0.05, "trust": 0.5, "nesterov": nesterov,
        "clip": clip,
    }  # fmt: skip
    made = LARS(parameters, **options, exclude_1d=exclude)
    expected = [p.detach().flatten().tolist() for p in parameters]
    moved = [[0.0] * len(w) for w in expected]
    for number in range(4):
        made.param_groups[0]["lr"] = options["lr"] = 0.3 / (number + 1)
        gradients = [draw(shape) for shape in SHAPES]
        gradients[3].mul_(0 if number == 2 else 100)  # its slope is 0; and much, so that clip bites
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()
        made.step()
        for p, w, g, v in zip(parameters, expected, gradients, moved, strict=True):
            slow(w, g.flatten().tolist(), v, exclude and p.dim() <= 1, options)
        for p, w in zip(parameters, expected, strict=True):
            assert p.detach().flatten().tolist() == pytest.approx(w, rel=1e-12, abs=1e-15)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    one, other = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    one.grad = torch.ones(2, 2)
    made = LARS([one, other], lr=1.0, weight_decay=0.1)
    made.step()
    assert torch.equal(other, torch.ones(2, 2)) and other not in made.state
    assert not torch.equal(one, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("options", "key"),
    [({"lr": -1}, "lr"), ({"lr": 1, "trust": -1}, "trust"),
     ({"lr": 1, "momentum": 0, "nesterov": True}, "nesterov")],
)  # fmt: skip
def test_options_out_of_range_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        LARS([nn.Parameter(torch.ones(1))], **options)
    assert error.value.key == f"optimizer.{key}"


def lars(model: nn.Module) -> LARS:
    return LARS(model.parameters(), lr=0.1, weight_decay=0.01, trust=0.1)


def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": lars, "schedule": r1.Plan("warmup_cosine")}
    folder, save = tmp_path / "run", {"every_updates": 5}
    at = {"at": At("on_forward", 13)}
    ended = process.run(r1.train, folder, probe_of(folder), hooks=at, save=save, **options)
    assert ended.code < 0
    process.result(r1.train, folder, probe_of(folder), save=save, **options)
    assert_eq(undisturbed(**options), folder)
