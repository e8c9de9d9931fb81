"""Functions in the replicas of a new process, as ``torch_xla.launch`` starts them; on the CPU.

The replicas are threads of one process, which is started below the one that launches them.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.rigs import process
from tests.rigs.pairs import Case, Failed
from tests.rigs.process import Ended

LIMIT = 240.0
"""Seconds that a process of several cases gets before it counts as hanging."""


def results(cases: Sequence[Case], replicas: int = 2, limit: float = LIMIT) -> list[list[Any]]:
    """By case, what it returned in each replica; a :class:`Failed` where it raised an error.

    Args:
        cases: functions at the top of a module, each with its options, one after another.
        limit: seconds that all of them have together.

    Raises:
        AssertionError: the process hangs, or has ended otherwise than by its functions' ends.
    """
    folder = Path(tempfile.mkdtemp(dir=process.scratch()))
    ended = run(_all, list(cases), str(folder), replicas=replicas, limit=limit)
    files = [folder / str(rank) for rank in range(replicas)]
    assert ended.code == 0 and all(file.exists() for file in files), ended.output
    by_rank = [pickle.loads(file.read_bytes()) for file in files]
    return [list(case) for case in zip(*by_rank, strict=True)]


def result(function: Callable[..., Any], **options: Any) -> list[Any]:
    """What one function returned, by rank, where it ended well on all.

    Raises:
        AssertionError: it did not.
    """
    (found,) = results([(function, options)])
    failed = [one for one in found if isinstance(one, Failed)]
    assert not failed, failed
    return found


def run(function: Callable[..., Any], *args: Any, replicas: int = 2, limit: float = LIMIT) -> Ended:
    """``function(*args)`` in each replica of a new process, to the end of that.

    Raises:
        AssertionError: it hangs.
    """
    return process.start(launch, replicas, function, *args).wait(limit)


def launch(replicas: int, function: Callable[..., Any], *args: Any) -> None:
    """In a new process: start the replicas and wait for them."""
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(replicas),
        XLA_ENABLE_PARAM_ALIASING="0",
        XLA_FLAGS="--xla_backend_optimization_level=0",
    )
    import torch_xla

    torch_xla.launch(_call, args=(function, args), start_method="fork")


def _call(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    function(*args)


def rank() -> int:
    """Of this replica."""
    import torch_xla

    return int(torch_xla.runtime.global_ordinal())


def compiled() -> int:
    """Graphs that this process has compiled so far, for all replicas together."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


def _all(cases: list[Case], folder: str) -> None:
    found: list[Any] = []
    for function, options in cases:
        print(rank(), function.__name__, options, flush=True)
        try:
            found.append(function(**options))
        except Exception as error:
            found.append(Failed(f"{type(error).__name__}: {error}"))
    (Path(folder) / str(rank())).write_bytes(pickle.dumps(found))
