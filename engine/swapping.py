"""Swapping: other values in a model's tensors while a test phase lasts, and the raw ones back.

Values are copied and tensors stay: optimizers, compiled models and the flat memory of recurrent
layers hold on to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phaseloop.engine.shards import local


class Place(NamedTuple):
    """Where a module holds a tensor."""

    owner: nn.Module
    key: str
    buffer: bool

    @property
    def tensor(self) -> Tensor:
        """What is there now; a module may give itself another buffer."""
        tensors = self.owner._buffers if self.buffer else self.owner._parameters
        found = tensors[self.key]
        assert found is not None
        return found


def places(model: nn.Module) -> dict[str, Place]:
    """Every parameter and every buffer that is saved, by name; a shared one by its first name."""
    found: dict[str, Place] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        kinds: list[tuple[bool, Mapping[str, Tensor | None]]] = [
            (False, module._parameters),
            (True, module._buffers),
        ]
        for buffer, tensors in kinds:
            for key, tensor in tensors.items():
                lost = buffer and key in module._non_persistent_buffers_set
                if tensor is not None and not lost and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{key}" if prefix else key] = Place(module, key, buffer)
    return found


def state_with(model: nn.Module, values: Mapping[int, Tensor]) -> dict[str, Any]:
    """``model.state_dict()`` with other values for the tensors with these ids.

    What is one tensor in the model is one object in the result.
    """
    state: dict[str, Any] = model.state_dict()
    first: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            value = values.get(id(tensor), state[name])
            state[name] = first.setdefault(id(tensor), value)
    return state


class _Raw(NamedTuple):
    """A tensor of the model, and the value that it has outside the test."""

    place: Place
    tensor: Tensor
    value: Tensor


class Swapping:
    """What a test phase finds in the model instead of the raw values.

    Args:
        model: the bare model.

    Attributes:
        owner: name of the hook whose averages are tested; empty: none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._raw: dict[str, _Raw] = {}
        self.owner = ""

    def keep(self, names: Iterable[str]) -> None:
        """Put the raw values of these tensors by: they will be changed until :meth:`put_back`."""
        there = places(self._model)
        for name in names:
            if name not in self._raw:
                tensor = there[name].tensor
                self._raw[name] = _Raw(there[name], tensor, tensor.detach().clone())

    def put_in(self, values: Mapping[str, Tensor]) -> None:
        """Let the model have these values, by the names of :func:`places`."""
        self.keep(values)
        if values:
            targets = [local(self._raw[name].place.tensor.detach()) for name in values]
            torch._foreach_copy_(targets, [local(value) for value in values.values()])

    def put_back(self) -> None:
        """Let the model have its raw values again, in the tensors that it had; else nothing."""
        for raw in self._raw.values():
            raw.tensor.detach().copy_(raw.value)
            if raw.place.buffer:  # a forward pass may have put another tensor there
                raw.place.owner._buffers[raw.place.key] = raw.tensor
        self._raw = {}  # only now: cut short, it can be done again

    def raw_parameters(self) -> list[tuple[str, Tensor]]:
        """The model's parameters by name, each with its raw value."""
        values = self._values()
        return [(name, values.get(id(p), p).detach()) for name, p in self._model.named_parameters()]

    def raw_state(self) -> dict[str, Any]:
        """The model's ``state_dict`` as it is outside the test."""
        return state_with(self._model, self._values())

    def _values(self) -> dict[int, Tensor]:
        now = {id(raw.place.tensor): raw.value for raw in self._raw.values()}
        return {**now, **{id(raw.tensor): raw.value for raw in self._raw.values()}}
