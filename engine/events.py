"""Events: what a hook can listen to, and who is called in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phaseloop.engine.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from phaseloop.engine.task import Task
    from phaseloop.engine.trainer import Outcome


class Order:
    """Where a hook stands among those that listen to the same event; lower is earlier."""

    SYNC_METERS = 0  # first at a phase's end: everyone after it sees meters that all ranks share
    BARRIER = 1
    LEARNING_RATE = 10  # before the finite check, which may skip the update
    FREEZE = 15
    FINITE = 20
    DEFAULT = 50  # measuring: before what writes the measurements down
    AVERAGE = 55
    STOP = 60  # early stopping and best-keeping: before logging says what happened
    SYNC_ROWS = 65  # just before logging: everyone after it sees rows that all ranks share
    LOG = 70
    CHECKPOINT = 100  # last: what it saves includes what everyone before it did


class Hook:
    """Base of all hooks: one method per event, each doing nothing.

    A hook overrides the events that it wants; the others cost nothing. ``task`` is the whole
    training; a hook talks to the task and never to another hook. What must survive a restart
    goes through :meth:`state_dict` as tensors and plain Python.

    ``progress.updates`` is k-1 in every event up to and including ``on_update`` of update k, and
    k from ``on_step`` on.
    """

    order: ClassVar[int] = Order.DEFAULT

    only_watches: ClassVar[bool] = False
    """It measures or logs and changes nothing of the training: it may come and go on a resume."""

    shapes_tests: ClassVar[bool] = False
    """It decides what a test phase tests, such as averaged weights: it is on with only=test too."""

    reads_training_data: ClassVar[bool] = False
    """It reads training data for a test phase: only=test then opens the training data too."""

    saves: ClassVar[bool] = False
    """It writes checkpoints, and so may stand at ``Order.CHECKPOINT``."""

    for_processes: ClassVar[bool] = False
    """It is of use with several processes only, and is left out with one."""

    alike: ClassVar[bool] = False
    """Of several processes, it leaves an update out on all of them or on none. Where a hook that
    listens to ``on_gradients`` does not say so, they agree at each update, by a message."""

    name: str = ""
    """The key in the ``hooks:`` mapping; set by the dispatcher."""

    def on_start(self, task: Task) -> None:
        """Everything is built, and on a resume (``task.resumed``) model and progress restored."""

    def on_resume(self, task: Task) -> None:
        """Only on a resume: every hook's state is restored too."""

    def on_phase_start(self, task: Task) -> None:
        """``task.phase`` begins; once per phase, however often it is interrupted."""

    def on_forward(self, task: Task) -> None:
        """``task.output`` is there."""

    def on_loss_and_meter(self, task: Task) -> None:
        """``task.loss`` is there and the meters are updated."""

    def on_backward(self, task: Task) -> None:
        """This micro-batch's gradients are added."""

    def on_gradients(self, task: Task) -> None:
        """The window is complete and its gradients averaged; before clipping and the optimizer."""

    def on_update(self, task: Task) -> None:
        """The parameters have changed."""

    def on_step(self, task: Task) -> None:
        """A step is over and committed; ``task.updated`` says whether it closed an update."""

    def on_phase_end(self, task: Task) -> None:
        """``task.phase`` is over; once per phase. Metrics are in ``task.phase.metrics``."""

    def on_loop_end(self, task: Task) -> None:
        """The loop is left without an error, finished or stopped: the last chance to save."""

    def on_exception(self, task: Task, error: BaseException) -> None:
        """``error`` ends the run; called before ``on_end``."""

    def on_end(self, task: Task, outcome: Outcome) -> None:
        """The run ends, however it ends: always called, once, if ``on_start`` was reached."""

    def state_dict(self) -> dict[str, Any]:
        """What has to be in a checkpoint: tensors and plain Python."""
        return {}

    def files(self) -> list[Path]:
        """Files that :meth:`state_dict` counts on, such as one whose length is in it.

        They are flushed to disk before a checkpoint is.
        """
        return []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; called after ``on_start``."""

    def holds(self, task: Task) -> list[Tensor]:
        """Tensors of the model that it will hold a copy of, on the device, for as long as the run.

        Asked by ``plan=true``, for what it says of memory. A copy counts as float32 where the
        tensor has half the precision.
        """
        return []


EVENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


Listener = Callable[..., None]

# Stands where nobody listens. What it gives is thrown away: any built-in function of one argument
# would do, and costs half of an empty function in Python, six times a step.
_nobody: Callable[..., Any] = id


class Dispatcher:
    """The hooks of a run in their order; calling ``dispatcher.on_step(task)`` calls them all.

    Only methods that a hook really overrides are called. One listener is called directly.

    Args:
        hooks: instance name to hook, in the order of the configuration.

    Raises:
        ConfigError: a value is no :class:`Hook`, or its ``order`` would put it after the
            checkpoint, which then would not hold what it does.

    Attributes:
        may_differ: what ``on_gradients`` leaves out may differ from process to process.
    """

    on_start: Callable[[Task], None]
    on_resume: Callable[[Task], None]
    on_phase_start: Callable[[Task], None]
    on_forward: Callable[[Task], None]
    on_loss_and_meter: Callable[[Task], None]
    on_backward: Callable[[Task], None]
    on_gradients: Callable[[Task], None]
    on_update: Callable[[Task], None]
    on_step: Callable[[Task], None]
    on_phase_end: Callable[[Task], None]
    on_loop_end: Callable[[Task], None]

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        if not isinstance(hooks, Mapping):
            raise ConfigError("hooks", "give a mapping of names to hooks")
        for name, hook in hooks.items():
            _check(name, hook)
            hook.name = name
        self.hooks: dict[str, Hook] = dict(sorted(hooks.items(), key=lambda item: item[1].order))
        self._listeners: dict[str, tuple[Callable[..., None], ...]] = {}
        for event in EVENTS:
            methods = tuple(
                getattr(hook, event)
                for hook in self.hooks.values()
                if getattr(type(hook), event) is not getattr(Hook, event)
            )
            self._listeners[event] = methods
            setattr(self, event, _call_all(methods))
        self.may_differ = any(
            not self.hooks[name].alike and not self.hooks[name].only_watches
            for name in self.listeners("on_gradients")
        )

    def listeners(self, event: str) -> list[str]:
        """Names of the hooks that listen to ``event``, in the order they are called."""
        return [method.__self__.name for method in self._listeners[event]]  # type: ignore[attr-defined]

    def call_through(self, wrap: Callable[[str, Listener], Listener] | None) -> None:
        """Have what ``wrap`` makes of each listener called in its place; None: the listeners.

        :meth:`call_isolated` calls the listeners themselves all the same.

        Args:
            wrap: called with the name of a hook and its method for one event.
        """
        for event, methods in self._listeners.items():
            if wrap is not None:
                methods = tuple(wrap(method.__self__.name, method) for method in methods)  # type: ignore[attr-defined]
            setattr(self, event, _call_all(methods))

    def call_isolated(self, event: str, *args: Any) -> list[BaseException]:
        """Call everyone who listens to ``event``, whatever the others raise; the errors raised."""
        errors: list[BaseException] = []
        for method in self._listeners[event]:
            try:
                method(*args)
            except BaseException as error:  # an impatient Ctrl-C too
                errors.append(error)
        return errors

    def state_dict(self) -> dict[str, Any]:
        """The states of all hooks that have one, by instance name."""
        states = {name: hook.state_dict() for name, hook in self.hooks.items()}
        return {name: state for name, state in states.items() if state}

    def files(self) -> list[Path]:
        """The files that the states of all hooks count on."""
        return [path for hook in self.hooks.values() for path in hook.files()]

    def load_state_dict(self, states: dict[str, Any]) -> list[str]:
        """Give each hook its state back; the names in ``states`` that no hook has."""
        for name, hook in self.hooks.items():
            if name in states:
                hook.load_state_dict(states[name])
        return [name for name in states if name not in self.hooks]


def _check(name: str, hook: Hook) -> None:
    if not isinstance(hook, Hook):
        raise ConfigError(f"hooks.{name}", f"{type(hook).__name__} is not a phaseloop Hook")
    for method in dir(hook):
        if method.startswith("on_") and method not in EVENTS:
            raise ConfigError(
                f"hooks.{name}",
                f"there is no event {method!r}.{nearest(method, EVENTS)} "
                f"There are: {', '.join(EVENTS)}",
            )
    if hook.order > Order.CHECKPOINT or (hook.order == Order.CHECKPOINT and not hook.saves):
        raise ConfigError(
            f"hooks.{name}",
            f"order {hook.order} is not before the checkpoint's {Order.CHECKPOINT}; "
            f"what the hook does then would be missing from every checkpoint",
        )


def _call_all(methods: tuple[Callable[..., None], ...]) -> Callable[..., None]:
    """One function that calls all ``methods`` in turn."""
    if not methods:
        return _nobody
    if len(methods) == 1:
        return methods[0]

    def call_all(task: Task) -> None:
        for method in methods:
            method(task)

    return call_all
