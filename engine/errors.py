"""Every error that phaseloop raises by name, so that a caller can tell them apart."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PhaseloopError(Exception):
    """Base of all errors that phaseloop raises on its own account."""


class ConfigError(PhaseloopError):
    """Something in the configuration is wrong; the command line exits with 2.

    Args:
        key: full path of the key to change, e.g. ``hooks.checkpoint.every_epochs``.
        problem: what was given and what is allowed, one sentence.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key = key
        self._given = key, problem

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), self._given  # by the text alone it could not be made again elsewhere


class RegistryError(PhaseloopError):
    """A name is registered twice, or is asked for and not registered."""


class NoBatchError(PhaseloopError):
    """A step asked for more micro-batches than the plan gives."""


class DataError(PhaseloopError):
    """The data cannot be used as configured: empty, too small, or broken off early."""


class MetricError(PhaseloopError):
    """A hook needs a metric that no meter reports."""


class CheckpointError(PhaseloopError):
    """A checkpoint cannot be written, read or trusted, or does not fit this run."""


class InUseError(PhaseloopError):
    """Another process trains in the run's folder."""


class PeerError(PhaseloopError):
    """Another process of this run has failed; it says itself why."""


class DamagedError(CheckpointError):
    """A checkpoint is incomplete or not what was written; one before it may be whole."""


class NonFiniteError(PhaseloopError):
    """A loss, gradient or weight is NaN or infinite and the policy is to stop."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the allowed name most like ``name``, or an empty string."""
    others = [other for other in allowed if other != name]
    found = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def listing(names: Iterable[str]) -> str:
    """The names sorted and joined with commas, for the end of an error's sentence."""
    return ", ".join(sorted(names)) or "none"
