"""Activation checkpointing: a module keeps its input, and computes the rest again in backward."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phaseloop.engine.backends.base import Again, Backend
from phaseloop.engine.errors import PhaseloopError
from phaseloop.engine.rng import HostGenerators


def recomputing(
    compile: Mapping[str, Any] | None, backend: Backend | None = None
) -> Callable[..., Any]:
    """A function to be bound to modules in place of their class's forward.

    It is called ``forward``, so that a pickled module finds the one of its class again.

    Args:
        compile: options of ``torch.compile`` for what the module computes; None: as it is.
        backend: of a device that torch's checkpoint may not know.
    """

    compiled: dict[type[nn.Module], Callable[..., Any]] = {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        if cls not in compiled:
            compiled[cls] = cls.forward if compile is None else _compiled(cls, compile)
        own = types.MethodType(compiled[cls], self)
        if not torch.is_grad_enabled():  # in a test phase nothing is kept anyway
            return own(*args, **kwargs)
        device = None if backend is None else backend.again(self, (args, kwargs))
        before = _Before(self)
        options: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": True,
            "context_fn": lambda: (nullcontext(), before.again(self, device)),
        }
        try:
            if device is None:
                return checkpoint(own, *args, **options, **kwargs)
            # Without arguments, by which torch would look for the device.
            output = checkpoint(functools.partial(own, *args, **kwargs), **options)
        finally:
            before.let_go()
        return device.computed(output)

    if compile is None:
        return forward
    # Compiled code could not put generators and buffers back; so each module is compiled by itself.
    disabled: Callable[..., Any] = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]
    return disabled


def _compiled(cls: type[nn.Module], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The forward of a class, compiled.

    As a function with code of its own: where torch gives up on the model's forward, as it does
    when a loop in it calls what is not compiled, it marks the code, which may be this class's too.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_of_{cls.__name__}")
    made: Callable[..., Any] = torch.compile(forward, **options)
    return made


class _Before:
    """What a forward may change beside its result, as it was: buffers, and the host's generators.

    torch's checkpoint puts back torch's own generators only, and would move the running
    statistics of a batch norm twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._generators = HostGenerators()
        self._owners = [
            (m, {name: b for name, b in m._buffers.items() if b is not None})
            for m in module.modules()
            if m._buffers
        ]
        self._copies = {id(b): b.clone() for _, were in self._owners for b in were.values()}
        self._versions = self._versions_now()

    def let_go(self) -> None:
        """After the forward: keep copies only of the buffers of those modules that changed any."""
        now = self._versions_now()
        kept = {
            id(b)
            for m, were in self._owners
            if _is_statistics(m) or any(self._changed(m, name, b, now) for name, b in were.items())
            for b in were.values()
        }
        self._copies = {key: copy for key, copy in self._copies.items() if key in kept}

    @contextmanager
    def again(self, module: nn.Module, device: Again | None) -> Iterator[None]:
        """Everything as it was before, and after it as it is now.

        Args:
            device: its part, where torch's checkpoint does not know it.

        Raises:
            PhaseloopError: a buffer that the forward left alone was changed since.
        """
        self._check()
        generators = HostGenerators()
        buffers = [(m, dict(m._buffers)) for m in module.modules()]
        copies = {key: b.clone() for key, b in self._copies.items()}
        for m, were in self._owners:
            m._buffers.update({name: copies.get(id(b), b) for name, b in were.items()})
        self._generators.put_back()
        try:
            with nullcontext() if device is None else device.state():
                yield
        finally:
            generators.put_back()
            for m, now in buffers:
                m._buffers.clear()
                m._buffers.update(now)

    def _check(self) -> None:
        now = self._versions_now()
        for m, were in self._owners:
            for name, b in were.items():
                if id(b) not in self._copies and self._versions[id(b)] != now[id(b)]:
                    raise PhaseloopError(
                        f"model.checkpoint: the buffer {name!r} of a {type(m).__name__} was "
                        f"changed between its forward and backward, which computes with it again; "
                        f"leave this module out"
                    )

    def _changed(self, m: nn.Module, name: str, b: Tensor, now: Mapping[int, int]) -> bool:
        replaced = m._buffers.get(name) is not b
        return replaced or b.is_inference() or now[id(b)] != self._versions[id(b)]

    def _versions_now(self) -> dict[int, int]:
        return {
            id(b): 0 if b.is_inference() else b._version
            for _, were in self._owners
            for b in were.values()
        }


def _is_statistics(module: nn.Module) -> bool:
    """Batch norms write to their running statistics without the tensors' versions telling."""
    return any(name.startswith("running_") for name in module._buffers)
