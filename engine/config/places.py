"""Places: where a command line does its work: in this process, or as a job of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phaseloop.engine import durations
from phaseloop.engine.config.typed import check_keys, to_dataclass
from phaseloop.engine.errors import ConfigError, listing, nearest

HERE, SLURM = "local", "slurm"


@dataclass
class Slurm:
    """A job of Slurm, submitted by submitit.

    Args:
        cluster: ``slurm``; or ``local``, to try on this machine all that happens to a job.
        partition, account, qos, constraint: what sbatch calls so.
        time: how long the job may take, such as ``4h``; then it is saved and queued again.
        gpus_per_node, cpus_per_node, mem_gb: on each machine; None: as the cluster has it.
        signal_before: how long before its time is over the job is told to save.
        requeues: how often a job that ran out of time is queued again; one that had to make room
            for another always is.
        setup: lines of shell before the job, such as ``module load``.
        options: any other option of sbatch, by its long name.
        folder: for the job's scripts and logs, on all machines; None: beside the run's folder.
        wait: until the job is over, and exit with its code.
    """

    cluster: Literal["slurm", "local"] = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str = "1h"
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    mem_gb: float | None = None
    signal_before: str = "2m"
    requeues: int = 3
    setup: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    folder: str | None = None
    wait: bool = False

    @property
    def minutes(self) -> int:
        """The job's time, in whole minutes as Slurm counts, rounded up."""
        return -int(-durations.seconds(self.time, "launch.time") // 60)

    @property
    def delay(self) -> int:
        """Seconds from the signal to the end of the job's time."""
        return int(durations.seconds(self.signal_before, "launch.signal_before"))

    def check(self, key: str = "launch") -> None:
        """Raises ConfigError for a number out of range."""
        if self.delay >= 60 * self.minutes:
            raise ConfigError(
                f"{key}.signal_before", f"{self.signal_before} is no less than the job's time"
            )
        least = {"gpus_per_node": 1, "cpus_per_node": 1, "mem_gb": 0.001, "requeues": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{key}.{name}", f"{value} is less than {bound}")


def job(section: Mapping[str, Any]) -> Slurm | None:
    """The job that the section ``launch`` asks for; None: the work is done here.

    Raises:
        ConfigError: a key is wrong.
    """
    options = {key: value for key, value in section.items() if key != "name"}
    name = section.get("name", HERE)
    if name == HERE:
        check_keys(options, [], "launch")
        return None
    if name != SLURM:
        names = (HERE, SLURM)
        hint = nearest(str(name), names)
        raise ConfigError("launch.name", f"{name!r} is none.{hint} There are: {listing(names)}")
    slurm = to_dataclass(Slurm, options, "launch")
    slurm.check()
    return slurm
