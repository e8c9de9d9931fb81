"""Hook ``freeze``: parameters that are frozen for the first part of a run, or from some time on."""

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.freezing import Matched
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("freeze")
class Freeze(Hook):
    """Freezes by pattern for the first n updates or epochs, or after n; give one of the four.

    Frozen parameters stay in the optimizer. Without a gradient it passes them over: neither
    momentum nor weight decay moves them. Batch norms among them are in evaluation mode. What is
    frozen depends on the progress alone, so that it needs no state.

    Args:
        patterns: as for the root key ``freeze``: names of parameters or modules, with ``*``.
        first_updates, first_epochs: frozen until so many are made, trained after that.
        after_updates, after_epochs: trained until so many are made, frozen after that.

    Raises:
        ConfigError: not exactly one length is given, or it is less than 1.
    """

    order = Order.FREEZE

    def __init__(
        self,
        patterns: list[str],
        first_updates: int | None = None,
        first_epochs: int | None = None,
        after_updates: int | None = None,
        after_epochs: int | None = None,
    ) -> None:
        lengths = {"first_updates": first_updates, "first_epochs": first_epochs,
                   "after_updates": after_updates, "after_epochs": after_epochs}  # fmt: skip
        given = {name: value for name, value in lengths.items() if value is not None}
        if len(given) != 1:
            raise ConfigError(
                "hooks.freeze",
                f"give exactly one of {', '.join(lengths)}; got {', '.join(given) or 'none'}",
            )
        ((self._name, self._length),) = given.items()
        if self._length < 1:
            raise ConfigError(f"hooks.freeze.{self._name}", f"{self._length} is less than 1")
        self.patterns = patterns
        self._in_epochs = self._name.endswith("epochs")
        self._matched = Matched(frozenset(), frozenset())
        self._frozen = False

    def on_start(self, task: Task) -> None:
        key = f"hooks.{self.name}.patterns"
        self._matched = task.freezing.match(self.patterns, key)
        task.freezing.check_left(task.trainable, self._matched, key)
        self._frozen = False
        self._set(task)

    def on_resume(self, task: Task) -> None:
        # After a roll-back, too, where it may have been otherwise in between.
        self._frozen = False
        task.freezing.release(f"hooks.{self.name}")
        self._set(task)

    def on_phase_start(self, task: Task) -> None:
        if task.train:
            self._set(task)

    def on_step(self, task: Task) -> None:
        if task.updated and not self._in_epochs:
            self._set(task)

    def _set(self, task: Task) -> None:
        progress = task.progress
        # The update, or epoch, that is made next or being made, from 1.
        number = progress.epoch if self._in_epochs else progress.updates + 1
        frozen = (number > self._length) is self._name.startswith("after")
        if frozen == self._frozen:
            return
        self._frozen = frozen
        if frozen:
            task.freezing.hold(f"hooks.{self.name}", self._matched)
        else:
            task.freezing.release(f"hooks.{self.name}")
