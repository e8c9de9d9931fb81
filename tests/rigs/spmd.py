"""Trainings on XLA in processes of their own, on one device or on two by SPMD; and R1 there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phaseloop.engine.backends import Backend, Single, Xla
from tests.rigs import process, r1

LIMIT = 240.0
"""Seconds that a process may take: the package is imported in each, and programs are compiled."""

DEVICES = 2


def backend(way: str, devices: int | None = DEVICES) -> Backend:
    """``single``, ``xla``, ``spmd``, or ``shard`` for SPMD with cut parameters, on the CPU."""
    if way == "single":
        return Single("cpu")
    if way == "xla":
        return Xla("cpu")
    return Xla("cpu", spmd=True, devices=devices, shard=way == "shard")


def compiles() -> int:
    """Programs that XLA has compiled in this process."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


def sharding(tensor: Any) -> str:
    """How XLA has a tensor on the devices: ``{replicated}``, ``{devices=[2,1]0,1}``."""
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def run(function: Callable[..., Any], *args: Any, **options: Any) -> process.Ended:
    """In a new process, to its end."""
    return process.start(function, *args, **options).wait(LIMIT)


def results(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What functions at the top of a module returned, all called in one new process, by name."""
    ended = run(_all, cases)
    assert ended.code == 0, ended.output
    return dict(ended.value)


def train(
    folder: Path,
    probe: Path | None = None,
    *,
    way: str = "spmd",
    devices: int | None = DEVICES,
    **options: Any,
) -> dict[str, Any]:
    """R1 in ``folder``; see :func:`tests.rigs.r1.train`."""
    return r1.train(folder, probe, backend=backend(way, devices), **options)


def _all(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: case() for name, case in cases.items()}


def close(one: Sequence[float], other: Sequence[float], tolerance: float = 1e-10) -> bool:
    """Relative to the larger, or to 1."""
    return len(one) == len(other) and all(
        abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)) for a, b in zip(one, other, strict=True)
    )
