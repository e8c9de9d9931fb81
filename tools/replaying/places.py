"""Places in memory: what the tensor there is called, and which operation made it not finite.

Below autograd a parameter is seen as any tensor, and as views and copies of it; what they share, or
were copied from, is the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from phaseloop.engine.task import Task
from phaseloop.tools.replaying.samples import roots
from phaseloop.tools.replaying.values import place_of, state_of


class Places:
    """What is known of the memory of a task, built.

    Attributes:
        before: what of the model and the optimizers is not finite to begin with.
    """

    def __init__(self, task: Task) -> None:
        self._names: dict[int, str] = {}
        self._sources: dict[int, str] = {}
        self._origins: dict[int, int | None] = {}
        self._held: list[Tensor] = []  # so that no other tensor gets their memory
        self.before = [*self._find_modules(task), *self._find_states(task)]

    def _find_modules(self, task: Task) -> Iterator[str]:
        for prefix, root in roots(task).items():
            for name, parameter in root.named_parameters():
                self._names[place_of(parameter)] = prefix + name
                if any(state_of(parameter)):
                    self.add_source(parameter, f"parameter {prefix}{name}")
                    yield prefix + name
            for name, buffer in root.named_buffers():
                # Infinities in a buffer are a mask, as a rule.
                if state_of(buffer)[0]:
                    self.add_source(buffer, f"buffer {prefix}{name}")
                    yield f"buffer {prefix}{name}"

    def _find_states(self, task: Task) -> Iterator[str]:
        names = task.parameter_names()
        for optimizer in task.optimizers.values():
            for moved, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and any(state_of(value)):
                        label = f"the optimizer's {key} of {names.get(id(moved), '?')}"
                        self.add_source(value, label)
                        yield label

    def add_source(self, tensor: Tensor, name: str) -> None:
        """``tensor`` was not finite before anything was computed with it."""
        self._sources[place_of(tensor)] = name
        self._held.append(tensor)

    def source_of(self, tensor: Tensor) -> str:
        """Its name where it was not finite to begin with; else empty."""
        return self._sources.get(place_of(tensor), "")

    def names_of(self, tensors: Iterable[Tensor]) -> list[str]:
        """Names of the parameters among them."""
        found = (self._names.get(place_of(tensor), "") for tensor in tensors)
        return list(dict.fromkeys(filter(None, found)))

    def follow(self, given: list[Tensor], gave: list[Tensor]) -> None:
        """A copy is called what it is a copy of."""
        if given and gave:
            here, there = place_of(given[0]), place_of(gave[0])
            if here == there or not (here in self._names or here in self._sources):
                return
            self._held.append(gave[0])
            for table in (self._names, self._sources):
                if here in table:
                    table[there] = table[here]

    def set_origin(self, tensors: list[Tensor], event: int | None) -> None:
        """What of ``tensors`` is not finite comes from this event; None: it was put in."""
        for tensor in tensors:
            self._origins[place_of(tensor)] = event
            self._held.append(tensor)

    def origin_of(self, tensors: Iterable[Tensor]) -> int | None:
        """The event that the first of them goes back to, if one is known; a NaN's before others."""
        found: list[tuple[bool, int]] = []
        for tensor in tensors:
            nan, inf = state_of(tensor)
            event = self._origins.get(place_of(tensor))
            if (nan or inf) and event is not None:
                found.append((not nan, event))
        return min(found)[1] if found else None

    def is_known(self, tensor: Tensor) -> bool:
        """An operation was seen to make it not finite."""
        return place_of(tensor) in self._origins
