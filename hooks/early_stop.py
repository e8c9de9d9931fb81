"""Hook ``early_stop``: ends the run when a metric has not improved for a while."""

import math
from typing import Any

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.ranking import Ranking
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("early_stop")
class EarlyStop(Hook):
    """Counts the scores since the best; at ``patience`` it asks for a stop.

    A NaN is never best and counts as no improvement; the first of equals stays best. While the
    count is at ``patience`` the hook asks again at every score and at every resume, so that a
    request dropped before ``phases.min_epochs`` is made again, unless the score has recovered.

    Args:
        metric: name, such as ``test/accuracy``.
        patience: scores without improvement until the stop.
        mode: ``max`` or ``min``; None: as the metric's meter declares.
        min_delta: least change that counts as an improvement.

    Raises:
        ConfigError: patience is less than 1, or the mode is neither.
    """

    order = Order.STOP

    def __init__(
        self, metric: str, patience: int, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise ConfigError("hooks.early_stop.patience", f"{patience} is less than 1")
        self.patience = patience
        self.ranking = Ranking("hooks.early_stop", metric, mode, min_delta)
        self.best = math.nan
        self.waited = 0

    def on_start(self, task: Task) -> None:
        self.ranking.resolve(task)

    def on_resume(self, task: Task) -> None:
        self._ask(task)

    def on_phase_end(self, task: Task) -> None:
        score = self.ranking.score(task)
        if score is None:
            return
        if self.ranking.better(score, self.best):
            self.best, self.waited = score, 0
        else:
            self.waited += 1
        self._ask(task)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "by": self.ranking.by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["by"] == self.ranking.by:  # of another metric, now that it may change, it is void
            self.best, self.waited = state["best"], state["waited"]

    def _ask(self, task: Task) -> None:
        if self.waited >= self.patience:
            task.request_stop(
                f"early_stop: {self.ranking.metric} has not improved on {self.best:g} "
                f"for {self.waited} scores (hooks.early_stop.patience={self.patience})",
                asks_again=True,
            )
