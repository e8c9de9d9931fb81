"""Settings: plain dataclasses that a configuration fills and Python users make by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.urls import check_no_scheme, check_url, is_url


@dataclass
class Run:
    """Where a run lives and how it behaves as a process.

    Args:
        dir: its folder, on this machine; None: no folder, nothing is saved.
        checkpoints: where its checkpoints lie: a folder, or a URL that fsspec reaches, such as
            ``s3://bucket/run``; None: ``checkpoints`` in the run's folder.
        storage_options: what the file system of that URL takes, such as an ``endpoint_url``.
        resume: ``auto``: go on from the folder's newest whole checkpoint; ``never``: put an old
            run's folder aside and start anew; a path or a URL: start from that checkpoint.
        threads: threads of torch's CPU operations; None: as torch chooses.
        deterministic: only operations that give the same bits each time.
        grace: seconds from SIGTERM or SIGHUP to leaving unsaved, when no border is reached before.
        log_every: updates from one log point to the next.
    """

    dir: str | None = None
    checkpoints: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    resume: str = "auto"
    threads: int | None = None
    deterministic: bool = True
    grace: float = 8.0
    log_every: int = 10

    def check(self, key: str = "run", others: Sequence[str] = ()) -> None:
        """Raises ConfigError for a number out of range, and a URL that cannot be used.

        Args:
            others: further places that ``storage_options`` may be for.
        """
        if self.dir is not None and is_url(self.dir):
            raise ConfigError(
                f"{key}.dir",
                f"{self.dir!r} is a URL: the run's folder holds its lock and its logs, and lies on "
                f"this machine; give the URL as {key}.checkpoints",
            )
        if self.dir is not None:
            check_no_scheme(self.dir, f"{key}.dir")
        if self.checkpoints == "":
            raise ConfigError(f"{key}.checkpoints", "give a folder, a URL or null")
        places = {"checkpoints": self.checkpoints or "", "resume": self.resume}
        for name, text in places.items():
            check_url(text, f"{key}.{name}")
        if self.storage_options and not any(map(is_url, [*places.values(), *others])):
            raise ConfigError(
                f"{key}.storage_options", f"are for a URL, and {key}.checkpoints is none"
            )
        for name, least in {"threads": 1, "grace": 0, "log_every": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{key}.{name}", f"{value} is less than {least}")


@dataclass
class Gradients:
    """What is done to gradients before the optimizer sees them.

    Args:
        clip_norm: largest norm over all gradients together: they are scaled by
            clip_norm / (norm + 1e-6) when that is less than 1 (``clip_grad_norm_``).
        norm_type: the p of that norm.
        clip_value: largest absolute value of each element.
    """

    clip_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None

    @property
    def clips(self) -> bool:
        """Gradients are changed at all."""
        return self.clip_norm is not None or self.clip_value is not None

    def check(self, key: str = "gradients") -> None:
        """Raises ConfigError for a bound that is not positive."""
        for name in ("clip_norm", "clip_value", "norm_type"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{key}.{name}", f"{value} is not greater than 0")


@dataclass
class Debug:
    """Short cuts for finding out whether something works at all.

    Args:
        fast: a try from end to end: so many batches of each phase, one epoch, nothing saved.
        overfit: train on the first so many batches of the first epoch only, the same ones in
            every epoch.
    """

    fast: int | None = None
    overfit: int | None = None

    def check(self, key: str = "debug") -> None:
        """Raises ConfigError for a number out of range, and when both are given."""
        for name in ("fast", "overfit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{key}.{name}", f"{value} is less than 1")
        if self.fast is not None and self.overfit is not None:
            raise ConfigError(f"{key}.overfit", "give fast or overfit, not both")


@dataclass
class LossScale:
    """How the scale begins and moves.

    Args:
        initial: scale of the first update.
        growth_interval: updates without overflow until it is multiplied by ``growth``.
        growth: more than 1.
        backoff: what it is multiplied by after an overflow; between 0 and 1.
    """

    initial: float = 65536.0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5

    def check(self, key: str) -> None:
        """Raises ConfigError for a number out of range."""
        wrong = {
            "initial": not self.initial > 0,
            "growth_interval": self.growth_interval < 1,
            "growth": not self.growth > 1,
            "backoff": not 0 < self.backoff < 1,
        }
        limits = {
            "initial": "more than 0",
            "growth_interval": "at least 1",
            "growth": "more than 1",
            "backoff": "between 0 and 1",
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(f"{key}.{name}", f"{getattr(self, name)} is not {limits[name]}")
