"""DDP: what several processes do together, and what they say where they cannot."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phaseloop import Data, Hook, Phases, Task, TensorData
from tests.engine.test_ddp import Branches, branched, make, seeded, state
from tests.rigs import pairs, process
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
    process.result(os.getpid)  # so that what starts processes is there
    begun = time.monotonic()
    ((first, second),) = pairs.results([(_branches, {"pattern": pattern, **data})])
    assert time.monotonic() - begun < 30
    for rank, found in enumerate((first, second)):
        assert isinstance(found, Failed), rank
        assert (UNUSED in found) == (rank in ranks), found


# --- memory ---

TOGGLED = 10
"""Updates after which a layer is frozen, or trained again, and the model is wrapped anew."""


class Toggles(Hook):
    """Freezes a layer and wakes it, and looks at what is alive."""

    def __init__(self, *at: int) -> None:
        self.at = at
        self.seen: list[tuple[int, int, int]] = []

    def on_step(self, task: Task) -> None:
        update = task.progress.updates
        if update % TOGGLED == 0:
            for parameter in task.bare_model[1].parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        if update in self.at:
            gc.collect()
            objects = gc.get_objects()
            wrappers = sum(isinstance(one, DistributedDataParallel) for one in objects)
            tensors = sum(isinstance(one, Tensor) for one in objects)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.seen.append((wrappers, tensors, pages * 4096))


def toggled(updates: int) -> list[tuple[int, int, int]]:
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 2))
    x = torch.randn(40, 4)
    task = Task(
        model=model, criterion=nn.CrossEntropyLoss(), backend=pairs.ddp(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train=Data(TensorData(x, (x.sum(1) > 0).long()), 4), phases=Phases(updates=updates),
    )  # fmt: skip
    hook = Toggles(2 * TOGGLED + 1, updates)
    pairs.train(task, toggles=hook)
    del task, model
    gc.collect()
    left = sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects())
    return [*hook.seen, (left, 0, 0)]


def test_mem_a_no_wrapper_outlives_its_use() -> None:
    ((first, second),) = pairs.results([(toggled, {"updates": 20 * TOGGLED + 1})])
    for found in (first, second):
        assert not isinstance(found, Failed), found
        (wrappers, tensors, bytes_), (wrappers_then, tensors_then, bytes_then), (left, _, _) = found
        assert (wrappers, wrappers_then, left) == (1, 1, 0)
        assert tensors_then <= tensors
        # Of 18 wrappers those that stayed would hold a megabyte of gradients each.
        assert bytes_then - bytes_ < 5 * 2**20
