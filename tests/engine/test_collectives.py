"""What processes average, seen without any processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phaseloop.engine.backends.collectives import Collectives
from phaseloop.engine.errors import PhaseloopError


def test_a_sparse_gradient_is_said_before_anything_is_told_the_others() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    backend = Collectives()
    backend.host = None  # type: ignore[assignment]  # whoever spoke to it would fail of that
    with pytest.raises(PhaseloopError, match=r"of shape \[5, 2\] has a sparse gradient"):
        backend._average([embedding.weight])
