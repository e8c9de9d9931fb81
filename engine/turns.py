"""Turns: which optimizers the next update moves, and which parameters those are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine.checkpoint.optimizer_state import check_names
from phaseloop.engine.errors import ConfigError, PhaseloopError, listing, nearest
from phaseloop.engine.gradients import clear, count_groups, optimized
from phaseloop.engine.schedules import Rates
from phaseloop.engine.settings import Gradients
from phaseloop.engine.walk import Walk

_IS_TRAINED = attrgetter("requires_grad")


class Turns(Walk):
    """The part of a task that knows its optimizers.

    Attributes:
        optimizers: by name; one without a name is called ``optimizer``.
        every: by name, how often an optimizer steps: at every n-th window.
        given_options: by name, the options of each group as it was made.
        clipping: by name, how its gradients are clipped.
        clips: some are.
        parameters_of: by name, what it moves.
        stepping: names of the optimizers that the next update moves.
        trainable: the parameters of those.
    """

    criterion_module: Any
    rates: dict[str, Rates]

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: dict[str, Optimizer] = {}
        self.every: dict[str, int] = {}
        self.given_options: dict[str, list[dict[str, Any]]] = {}
        self.has_frequencies = False
        self.clips = False
        self.clipping: dict[str, Gradients] = {}
        self.parameters_of: dict[str, list[nn.Parameter]] = {}
        self.stepping: tuple[str, ...] = ()
        self._chosen = False
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        self._wrapped_for: list[bool] = []
        self._shared_model: nn.Module

    def due(self, optimizer: str) -> bool:
        """Whether an optimizer steps in this window: at every n-th, counted over the stage.

        One whose parameters are all frozen does not.
        """
        self._check_name(optimizer)
        if (self.progress.windows_in_stage() + 1) % self.every[optimizer]:
            return False
        return any(p.requires_grad for p in self.parameters_of[optimizer])

    @contextmanager
    def only(self, *names: str) -> Iterator[None]:
        """Within it, gradients are made for these optimizers' parameters alone, and
        ``update`` moves these optimizers alone.

        ``requires_grad`` of every other parameter is put back after it, on an error too; a frozen
        parameter stays frozen.

        Raises:
            ConfigError: there is no optimizer of that name.
            PhaseloopError: no name is given, or it is within another ``only``.
        """
        for name in names:
            self._check_name(name)
        if not names or self._chosen:
            raise PhaseloopError("only() takes names of optimizers, and no other only() within it")
        before = self.stepping, self.trainable, self._chosen
        wanted = {id(p) for name in names for p in self.parameters_of[name]}
        asleep = [p for p in self._parameters if p.requires_grad and id(p) not in wanted]
        for parameter in asleep:
            parameter.requires_grad_(False)
        self._choose(names)
        self._chosen = True
        try:
            yield
        finally:
            for parameter in asleep:
                parameter.requires_grad_(True)
            self.stepping, self.trainable, self._chosen = before

    def _check_name(self, name: str) -> None:
        if name not in self.optimizers:
            raise ConfigError(
                "optimizers",
                f"none is called {name!r}.{nearest(name, self.optimizers)} "
                f"There are: {listing(self.optimizers)}",
            )

    def choose_due(self) -> None:
        """The next update moves the optimizers that are due; those of ``only`` are due anyway."""
        if not self._chosen:
            self._choose(tuple(name for name in self.optimizers if self.due(name)))
            due = {id(p) for p in self.trainable}
            clear(p for p in self._parameters if id(p) not in due)

    def _choose(self, names: tuple[str, ...]) -> None:
        self.stepping = names
        self.trainable = optimized(self.optimizers[name] for name in names)

    def find_parameters(self) -> None:
        """Look up which parameters the optimizers move, again after a group was added.

        Raises:
            PhaseloopError: one of them has no name, since it is neither the model's nor the
                criterion's.
        """
        names = self.parameter_names()
        for name, optimizer in self.optimizers.items():
            check_names(optimizer, names)
            self.parameters_of[name] = optimized([optimizer])
        self.groups = count_groups(self.optimizers)
        self._wrapped_for = []
        criterion = self.criterion_module
        modules = [self.bare_model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        self._parameters = [p for module in modules for p in module.parameters()]
        # Where a module keeps them: they may be replaced, and to look for them takes long.
        self._buffers = [part._buffers for module in modules for part in module.modules()]
        self._choose(self.stepping if self._chosen else tuple(self.optimizers))

    def take_added_groups(self) -> None:
        """At a window's start: move what a hook has added to an optimizer, to unfreeze it, say.

        What its parameters gathered while no optimizer had them is no part of any update.
        """
        if count_groups(self.optimizers) != self.groups:
            self.find_parameters()
            clear(self.trainable)

    # --- on several processes ---

    def wrap_model(self) -> None:
        """Let the backend reduce gradients in backward, where the step allows it.

        What is wrapped already stays so, through a test too, as long as the same is trained.
        """
        flags = self._flags()
        if flags != self._wrapped_for:
            self._wrapped_for = flags
            if flags[0]:
                self._shared_model = self.backend.wrap(self.bare_model)
            else:
                self.backend.unwrap()
                self._shared_model = self.bare_model
        self.model = self._shared_model

    def begin_shared_window(self) -> None:
        """Before a window of the training: buffers are equal, and what is trained is reduced."""
        self.wrap_model()
        self.equal_buffers()

    def equal_buffers(self) -> None:
        """Every process has the primary's buffers, of model and criterion."""
        found: dict[int, Tensor] = {}
        for own in self._buffers:
            if own:
                found.update({id(b): b for b in own.values() if b is not None})
        if found:
            self.backend.make_equal(list(found.values()))

    def _flags(self) -> list[bool]:
        """What the wrapper depends on: whether there may be one, and what is trained now."""
        facts = self.step_facts
        whole = facts.whole_model_forward and not facts.takes_window and not self.may_redo
        return [whole, *map(_IS_TRAINED, self._parameters)]

    def parameter_names(self) -> dict[int, str]:
        """``id`` of every parameter to its name; implemented by the task."""
        raise NotImplementedError
