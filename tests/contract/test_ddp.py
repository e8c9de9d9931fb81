"""DDP: what several processes do together, and what they say where they cannot."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from tests.engine.test_ddp import Branches, branched, make, seeded, state
from tests.rigs import pairs
from tests.rigs.pairs import Failed

UNUSED = "set backend.find_unused_parameters=true"


def _branches(pattern: list[int], **data: Any) -> tuple[dict[str, Tensor], float]:
    begun = time.monotonic()
    data = {"batch_size": len(pattern), "shuffle": False, **data}
    return state(make(seeded(Branches), samples=branched(pattern), data=data)), begun


# That rank 0 uses branch a, rank 1 branch b, and parameters are equal afterwards: tests/engine.
@pytest.mark.parametrize(
    ("pattern", "data", "ranks"),
    [
        ([0, 0, 1, 1], {}, [0, 1]),
        # The last micro-batch is the one that reduces.
        ([0, 0, 1, 1, 0, 0, 0, 0], {"micro_batch_size": 2}, [0, 1]),
        # Rank 0 uses both; it waits for rank 1, which has an error, and ends with it.
        ([0, 1, 1, 1], {}, [1]),
    ],
    ids=str,
)
def test_ddp_b_an_error_in_time(pattern: list[int], data: dict[str, Any], ranks: list[int]) -> None:
    begun = time.monotonic()
    ((first, second),) = pairs.results([(_branches, {"pattern": pattern, **data})])
    assert time.monotonic() - begun < 30
    for rank, found in enumerate((first, second)):
        assert isinstance(found, Failed), rank
        assert (UNUSED in found) == (rank in ranks), found
