"""Scaling the learning rate with the batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phaseloop.engine.errors import ConfigError

RULES = {"linear": "linearly", "sqrt": "by the square root"}


@dataclass
class ScaleWithBatch:
    """The base rate was found for another batch size, and is to follow the one at hand.

    Sources: Goyal et al., "Accurate, large minibatch SGD", 2017, for ``linear``; Krizhevsky, "One
    weird trick", 2014, and You et al. (LAMB), 2020, for ``sqrt``.

    Args:
        base: batch size, samples per update over all processes, that the base rate is for.
        rule: ``linear``: times batch size / base; ``sqrt``: times its square root.

    Raises:
        ConfigError: base is less than 1, or there is no such rule.
    """

    base: int
    rule: str = "linear"

    def __post_init__(self) -> None:
        self.check("schedule.scale_with_batch")

    def check(self, key: str) -> None:
        """Raises ConfigError for what cannot be."""
        if self.base < 1:
            raise ConfigError(f"{key}.base", f"{self.base} is less than 1")
        if self.rule not in RULES:
            raise ConfigError(f"{key}.rule", f"{self.rule!r} is not one of {', '.join(RULES)}")

    def factor(self, batch_size: int) -> float:
        """What the base rate is multiplied by."""
        ratio = batch_size / self.base
        return ratio if self.rule == "linear" else math.sqrt(ratio)

    def describe(self, before: float, after: float, batch_size: int) -> str:
        """One line for the log."""
        return (
            f"learning rate {before:g} -> {after:g}: scaled {RULES[self.rule]} "
            f"with batch size {batch_size} / {self.base}"
        )
