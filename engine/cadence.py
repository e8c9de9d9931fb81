"""Cadence: the updates at which something is done now and then, each once over all resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phaseloop.engine.errors import ConfigError

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class Cadence:
    """Every so many updates, and the first update of every so many epochs, from the first on.

    One that is left out does not count: the next is taken instead.

    Args:
        key: where the options stand, for messages.
        every_updates, every_epochs: None: never.

    Raises:
        ConfigError: one of them is below 1, or both are None.
    """

    def __init__(self, key: str, every_updates: int | None, every_epochs: int | None) -> None:
        for name, every in (("every_updates", every_updates), ("every_epochs", every_epochs)):
            if every is not None and every < 1:
                raise ConfigError(f"{key}.{name}", f"{every} is below 1")
        if every_updates is None and every_epochs is None:
            raise ConfigError(f"{key}.every_updates", "it and every_epochs are null: it is never")
        self.every_updates = every_updates
        self.every_epochs = every_epochs
        self._waiting = False

    def begin_phase(self, task: Task) -> None:
        """To be called at ``on_phase_start``; whether the first update of this one is due."""
        if task.train and self.every_epochs is not None:
            self._waiting = (task.progress.epoch - 1) % self.every_epochs == 0

    def due(self, task: Task) -> bool:
        """The update at hand, which is not counted yet, is one of them."""
        if self._waiting:
            return True
        every = self.every_updates
        return every is not None and (task.progress.updates + 1) % every == 0

    def counted(self) -> None:
        """One of them was counted."""
        self._waiting = False

    def state_dict(self) -> dict[str, Any]:
        """For a hook's own."""
        return {"waiting": self._waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse."""
        self._waiting = state["waiting"]
