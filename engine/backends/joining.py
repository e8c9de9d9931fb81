"""Joining: whether a launcher started this process as one of several, and which of them it is.

torchrun and our own launcher say so in the environment. ``srun`` of Slurm and ``horovodrun`` do in
variables of their own, which are put into the same form here. Of XLA's replicas the runtime knows.
Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from phaseloop.engine import replica
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.replica import Replica

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
STARTED_BY = "PHASELOOP_STARTED_BY"
"""Who set the variables above, where it was not torchrun."""

PHASELOOP, HOROVODRUN, XLA = "phaseloop", "horovodrun", "xla"

_OF_HOROVOD = {name: f"HOROVOD_{name}".replace("WORLD_", "") for name in _RANKS}
"""What horovodrun calls them."""

_FIRST_PORT, _PORTS = 15000, 15000  # below 32768, from where Linux hands ports out

_STDIN = 0


@dataclass(frozen=True)
class Joining:
    """This process among those that a launcher started.

    Attributes:
        rank: number of this process, from 0.
        world_size: how many there are.
        local_rank: number of this process among those on this machine.
        local_world_size: how many there are on this machine.
        by: ``torchrun``, ``slurm``, ``horovodrun``, ``phaseloop`` or ``xla``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    by: str


def found() -> Joining | None:
    """This process's place among those of a launcher; None where no launcher started it.

    Where Slurm did, the environment is completed with what torchrun would have set: the six
    variables that ``init_process_group`` reads. Where horovodrun did, with four of them: the
    processes meet by Horovod.

    Raises:
        ConfigError: variables are missing, are no numbers, or contradict one another.
    """
    environment = os.environ
    if (mine := _of_xla()) is not None:
        return Joining(mine.rank, mine.world_size, mine.local_rank, mine.local_world_size, XLA)
    of_horovod = all(name in environment for name in _OF_HOROVOD.values())
    if of_horovod and environment.get(STARTED_BY) != PHASELOOP:  # which sets them, too
        return _of_horovod(environment)
    if all(name in environment for name in _RANKS):
        return _of_torchrun(environment)
    if _in_step(environment):
        joining = _of_slurm(environment)
        _complete(joining, environment)
        return joining
    if some := [name for name in _RANKS if name in environment]:
        missing = [name for name in _RANKS if name not in environment]
        raise ConfigError(
            "backend",
            f"the environment has {', '.join(some)}, but not {', '.join(missing)}: start with "
            f"torchrun, which sets all of them, or unset them, or choose backend=single",
        )
    return None


def _of_xla() -> Replica | None:
    """The replica that ``torch_xla.launch`` has started this as; None: it has not."""
    if (mine := replica.mine()) is not None:
        return mine
    torch_xla = sys.modules.get("torch_xla")
    # Asked how many there are, the runtime would start, and nobody could launch any more.
    if torch_xla is None or not torch_xla._XLAC._xla_runtime_is_initialized():
        return None
    runtime = torch_xla.runtime
    if runtime.is_spmd() or runtime.world_size() == 1:
        return None
    found = Replica(
        runtime.global_ordinal(),
        runtime.world_size(),
        runtime.local_ordinal(),
        runtime.addressable_device_count() * runtime.local_process_count(),
    )
    if runtime.addressable_device_count() > 1:
        replica.enter(found)
    return found


def usual() -> str:
    """Name of the backend for a process that was started as this one was: what ``auto`` means.

    Raises:
        ConfigError: see :func:`found`.
    """
    joined = found()
    if joined is None:
        return "single"
    return {HOROVODRUN: "horovod", XLA: "xla"}.get(joined.by, "ddp")


def started_by_us() -> Joining | None:
    """The place among processes of our own launcher, which starts a single one, too."""
    if os.environ.get(STARTED_BY) != PHASELOOP:
        return None
    return found()


def machines(joining: Joining) -> int | None:
    """How many machines the processes are on; None: the launcher does not say."""
    name = "SLURM_STEP_NUM_NODES" if joining.by == "slurm" else "GROUP_WORLD_SIZE"
    if name in os.environ:
        return _number(name, os.environ)
    return 1 if joining.world_size == joining.local_world_size else None


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: ``node01`` of ``node[01-04,7],gpu3``.

    Raises:
        ConfigError: the list is empty.
    """
    # A comma within brackets separates numbers, one outside separates hosts.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts.strip())
    if first is None:
        raise ConfigError("backend", f"Slurm's list of hosts is {hosts!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Slurm's count of tasks on each node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ConfigError: the text is of another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError("backend", f"Slurm's count of tasks per node is {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _of_torchrun(environment: Mapping[str, str]) -> Joining:
    if missing := [name for name in _MEETING if not environment.get(name)]:
        raise ConfigError(
            "backend",
            f"the environment has {', '.join(_RANKS)}, but not {', '.join(missing)}: the processes "
            f"cannot find one another",
        )
    rank, size, local, local_size = (_number(name, environment) for name in _RANKS)
    joining = Joining(rank, size, local, local_size, environment.get(STARTED_BY) or "torchrun")
    _check(joining, dict(zip(("rank", "size", "local", "local_size"), _RANKS, strict=True)))
    return joining


def _of_horovod(environment: os._Environ[str]) -> Joining:
    rank, size, local, local_size = (_number(_OF_HOROVOD[name], environment) for name in _RANKS)
    joining = Joining(rank, size, local, local_size, HOROVODRUN)
    parts = ("rank", "size", "local", "local_size")
    _check(joining, dict(zip(parts, _OF_HOROVOD.values(), strict=True)))
    _complete_ranks(joining, environment)
    return joining


def _in_step(environment: Mapping[str, str]) -> bool:
    """``srun`` started this process as one of several.

    A batch script has no step, and a shell under ``srun --pty`` or ``salloc`` has a terminal, which
    no other task has: ``python`` in either is a process on its own, though Slurm's variables tell
    of all tasks of the job.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return False
    if os.isatty(_STDIN):
        return False
    return environment.get(_size_name(environment), "1") != "1"


def _size_name(environment: Mapping[str, str]) -> str:
    """The step's tasks; older versions of Slurm say it under the job's name alone."""
    step = "SLURM_STEP_NUM_TASKS"
    return step if step in environment else "SLURM_NTASKS"


def _of_slurm(environment: Mapping[str, str]) -> Joining:
    size_name = _size_name(environment)
    size = _number(size_name, environment)
    local_size, local_name = _local_size(size, environment)
    joining = Joining(
        rank=_number("SLURM_PROCID", environment),
        world_size=size,
        local_rank=_number("SLURM_LOCALID", environment),
        local_world_size=local_size,
        by="slurm",
    )
    names = {"rank": "SLURM_PROCID", "size": size_name, "local": "SLURM_LOCALID"}
    _check(joining, {**names, "local_size": local_name})
    return joining


def _local_size(size: int, environment: Mapping[str, str]) -> tuple[int, str]:
    """How many tasks there are on this node, and the variable that says so."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environment:
            continue
        counts = tasks_per_node(environment[name])
        if sum(counts) != size:
            raise ConfigError(
                "backend",
                f"{name}={environment[name]} makes {sum(counts)} tasks, and "
                f"{_size_name(environment)}={size}",
            )
        node = _number("SLURM_NODEID", environment) if len(counts) > 1 else 0
        if node >= len(counts):
            raise ConfigError(
                "backend", f"SLURM_NODEID={node}, and {name}={environment[name]} has no such node"
            )
        return counts[node], name
    return _number("SLURM_NTASKS_PER_NODE", environment), "SLURM_NTASKS_PER_NODE"


def _complete(joining: Joining, environment: os._Environ[str]) -> None:
    """Set what torchrun would have set; what somebody set himself stands, unless it is another."""
    address = environment.get("MASTER_ADDR") or _address(environment)
    port = environment.get("MASTER_PORT") or str(_port(environment))
    _complete_ranks(joining, environment)
    environment.update({"MASTER_ADDR": address, "MASTER_PORT": port})


def _complete_ranks(joining: Joining, environment: os._Environ[str]) -> None:
    values = (joining.rank, joining.world_size, joining.local_rank, joining.local_world_size)
    for name, value in zip(_RANKS, values, strict=True):
        if environment.get(name, str(value)) != str(value):
            whose = "Slurm" if joining.by == "slurm" else joining.by
            raise ConfigError(
                "backend",
                f"the environment has {name}={environment[name]}, and by {whose}'s variables it is "
                f"{value}: unset {name}",
            )
    environment.update({name: str(value) for name, value in zip(_RANKS, values, strict=True)})
    environment[STARTED_BY] = joining.by


def _address(environment: Mapping[str, str]) -> str:
    """The host of rank 0: Slurm gives the first node the first task."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(name):
            return first_host(environment[name])
    raise ConfigError(
        "backend",
        "Slurm's SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are missing: set MASTER_ADDR to the "
        "host of rank 0",
    )


def _port(environment: Mapping[str, str]) -> int:
    """A port that all tasks of a step derive alike, and two steps at once do not share."""
    step = _number("SLURM_STEP_ID", environment)
    job_name = "SLURM_JOB_ID" if "SLURM_JOB_ID" in environment else "SLURM_JOBID"
    return _FIRST_PORT + (_number(job_name, environment) + 97 * step) % _PORTS


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name)
    if text is None:
        raise ConfigError("backend", f"{name} is missing in the environment")
    if not text.isascii() or not text.isdigit():
        raise ConfigError("backend", f"{name}={text} in the environment is no number from 0 on")
    return int(text)


def _check(joining: Joining, names: Mapping[str, str]) -> None:
    """Raises ConfigError for numbers that cannot be true together."""
    pairs = [
        ("rank", joining.rank, "size", joining.world_size),
        ("local", joining.local_rank, "local_size", joining.local_world_size),
    ]
    for less, number, more, bound in pairs:
        if number >= bound:
            raise ConfigError(
                "backend", f"{names[less]}={number} has to be less than {names[more]}={bound}"
            )
    if joining.local_world_size > joining.world_size:
        raise ConfigError(
            "backend",
            f"{names['local_size']}={joining.local_world_size} is more than "
            f"{names['size']}={joining.world_size}",
        )
