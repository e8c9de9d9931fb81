"""Activation checkpointing: a module keeps its input, and computes the rest again in backward."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phaseloop.engine.rng import HostGenerators


def recomputing(compile: Mapping[str, Any] | None) -> Callable[..., Any]:
    """A function to be bound to modules in place of their class's forward.

    It is called ``forward``, so that a pickled module finds the one of its class again.

    Args:
        compile: options of ``torch.compile`` for what the module computes; None: as it is.
    """

    compiled: dict[type[nn.Module], Callable[..., Any]] = {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        if cls not in compiled:
            compiled[cls] = cls.forward if compile is None else _compiled(cls, compile)
        own = types.MethodType(compiled[cls], self)
        if not torch.is_grad_enabled():  # in a test phase nothing is kept anyway
            return own(*args, **kwargs)
        before = _Before(self)
        try:
            return checkpoint(
                own,
                *args,
                use_reentrant=False,
                preserve_rng_state=True,
                context_fn=lambda: (nullcontext(), before.again(self)),
                **kwargs,
            )
        finally:
            before.let_go()

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
        self._buffers = {id(b): b.clone() for b in module.buffers()}
        self._places = [
            (m, {n: id(b) for n, b in m._buffers.items() if b is not None})
            for m in module.modules()
            if m._buffers
        ]

    @contextmanager
    def again(self, module: nn.Module) -> Iterator[None]:
        """Everything as it was before, and after it as it is now."""
        generators = HostGenerators()
        buffers = [(m, dict(m._buffers)) for m in module.modules()]
        copies = {key: b.clone() for key, b in self._buffers.items()}
        for m, names in self._places:
            m._buffers.update({name: copies[key] for name, key in names.items()})
        self._generators.put_back()
        try:
            yield
        finally:
            generators.put_back()
            for m, now in buffers:
                m._buffers.clear()
                m._buffers.update(now)
