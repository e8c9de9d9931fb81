"""Augmentation on XLA: the draws are those of any other device."""

from __future__ import annotations

import torch
from torch import Tensor

from phaseloop import Draws
from phaseloop.engine.data import augment
from tests.rigs import process


def draws_on(kind: str) -> list[Tensor]:
    """What is drawn there for five samples, on the CPU."""
    device = torch.device("cpu")
    if kind == "xla":
        from phaseloop.engine.backends import Xla

        backend = Xla("cpu")
        backend.setup()
        device = backend.device
    keys = augment.sample_keys(3, 10**12, 5, None).to(device)
    draws = Draws(keys)
    return [draws.uniform(3, 2).cpu(), draws.uniform().cpu(), draws.normal(4).cpu()]


def test_the_draws_are_those_of_the_cpu() -> None:
    here, there = draws_on("cpu"), process.result(draws_on, "xla")
    assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])
    # A logarithm and a cosine may differ in their last bits.
    torch.testing.assert_close(here[2], there[2], rtol=1e-5, atol=1e-6)
