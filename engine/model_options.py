"""Model options: compiled, in channels-last layout, with activation checkpointing; names stay."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.recompute import recomputing


@dataclass
class Compile:
    """How the model is compiled; see ``torch.compile``.

    Args:
        backend: a name of ``torch.compiler.list_backends(None)``, or a function.
        mode: of the backend ``inductor``: ``reduce-overhead``, ``max-autotune``, ...
        dynamic: shapes may change without compiling again; None: where they are seen to.
        fullgraph: an error where the model cannot be compiled as one graph.
        options: of the backend; not together with ``mode``.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    options: dict[str, Any] | None = None

    def check(self, key: str = "model.compile") -> None:
        """Raises ConfigError for a backend or mode that torch does not have, and contradictions."""
        if not callable(self.backend):
            known = torch.compiler.list_backends(None)
            if self.backend not in known:
                given = self.backend
                hint = nearest(given, known) if isinstance(given, str) else ""
                raise ConfigError(
                    f"{key}.backend", f"{given!r} is no backend.{hint} There are: {listing(known)}"
                )
        if self.mode is not None:
            self._check_mode(f"{key}.mode")

    def _check_mode(self, key: str) -> None:
        if self.backend != "inductor":
            raise ConfigError(key, f"only inductor has modes, and {self.name} is asked for")
        if self.options is not None:
            raise ConfigError(key, "give mode or options, not both")
        from torch._inductor import list_mode_options

        if self.mode not in (known := list_mode_options()):
            raise ConfigError(key, f"{self.mode!r} is not one of {listing(known)}")

    @property
    def name(self) -> str:
        """The backend in a word."""
        return self.backend if isinstance(self.backend, str) else _name_of(self.backend)


@dataclass
class ModelOptions:
    """How the model's mathematics is carried out; what it is does not change.

    Args:
        compile: compile it, by default with inductor.
        channels_last: images as [B, H, W, C] in memory, in the model and in its input.
        checkpoint: patterns of module names, such as ``blocks.*``. What these modules compute on
            the way is not kept for backward but computed again there. Of modules inside each
            other the outermost counts.
    """

    compile: bool | Compile = False
    channels_last: bool = False
    checkpoint: list[str] = field(default_factory=list)

    @property
    def compiler(self) -> Compile | None:
        """How to compile; None: not at all."""
        if isinstance(self.compile, bool):
            return Compile() if self.compile else None
        return self.compile

    def check(self, key: str = "model") -> None:
        """Raises ConfigError for what is wrong with any model."""
        if not isinstance(self.compile, (bool, Compile)):
            raise ConfigError(f"{key}.compile", f"{self.compile!r} is not a bool or a Compile")
        if not isinstance(self.channels_last, bool):
            raise ConfigError(f"{key}.channels_last", f"{self.channels_last!r} is not a bool")
        patterns = self.checkpoint
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise ConfigError(f"{key}.checkpoint", f"{patterns!r} is not a list of patterns")
        compiler = self.compiler
        if compiler is not None:
            compiler.check(f"{key}.compile")
            if compiler.fullgraph and patterns:
                raise ConfigError(
                    f"{key}.compile.fullgraph",
                    f"modules of {key}.checkpoint are compiled each for itself: "
                    f"the model is never one graph",
                )

    def check_model(self, model: nn.Module, key: str = "model") -> None:
        """Raises ConfigError for what does not fit this model."""
        # By name: importing torch._dynamo takes seconds.
        if type(model).__name__ == "OptimizedModule":
            raise ConfigError(
                key,
                "what torch.compile(model) gives has other names for everything: give the model "
                "itself, and model.compile (ModelOptions(compile=True))",
            )
        if self.compile and model._compiled_call_impl is not None:
            raise ConfigError(f"{key}.compile", "the model is compiled already; leave one out")
        for name, module in _chosen(model, self.checkpoint, f"{key}.checkpoint").items():
            if "forward" in vars(module):
                raise ConfigError(
                    f"{key}.checkpoint", f"{name} has a forward of its own, set on the object"
                )

    def facts(self) -> dict[str, Any]:
        """What is on, as plain Python, by full key."""
        facts: dict[str, Any] = {}
        if self.compiler is not None:
            facts["model.compile"] = self.compiler.name
        if self.channels_last:
            facts["model.channels_last"] = True
        if self.checkpoint:
            facts["model.checkpoint"] = list(self.checkpoint)
        return facts

    def describe(self) -> list[str]:
        """What is on, for a reader: ``compiled by inductor``, ``channels last``."""
        words = [] if self.compiler is None else [f"compiled by {self.compiler.name}"]
        words += ["channels last"] if self.channels_last else []
        if self.checkpoint:
            words.append(f"activation checkpointing of {', '.join(self.checkpoint)}")
        return words


def lay_out(model: nn.Module, options: ModelOptions, backend: Backend | None = None) -> None:
    """Before the backend takes the model: its layout in memory, and the checkpointed forwards."""
    if options.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    chosen = _chosen(model, options.checkpoint, "model.checkpoint")
    if not chosen:
        return
    compiler = options.compiler
    forward = recomputing(None if compiler is None else vars(compiler), backend)
    for module in chosen.values():
        # A bound method, which a deep copy of the module binds to the copy.
        module.forward = types.MethodType(forward, module)


def compile_in_place(model: nn.Module, options: ModelOptions) -> None:
    """After the backend took the model: compile it. No module gets another name."""
    if options.compiler is not None:
        model.compile(**vars(options.compiler))


def release(model: nn.Module, options: ModelOptions) -> None:
    """After the run: the model is called as it was before; its layout stays."""
    if options.compile:
        model._compiled_call_impl = None
    for module in _chosen(model, options.checkpoint, "model.checkpoint").values():
        vars(module).pop("forward", None)


def channels_last(data: Any) -> Any:
    """``data`` with every floating-point tensor of four dimensions in channels-last layout."""
    return pytree.tree_map_only(Tensor, _channels_last, data)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _chosen(model: nn.Module, patterns: list[str], key: str) -> dict[str, nn.Module]:
    """The modules whose names match, by name; none that lies inside another of them.

    Raises:
        ConfigError: a pattern matches no module that has a forward.
    """
    if not patterns:
        return {}
    able = {
        name: module
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward  # a ModuleList has none
    }
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name in able if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(
                key,
                f"{pattern!r} matches no module with a forward.{nearest(pattern, able)} "
                f"There are: {listing(able)}",
            )
        matched |= found
    return {
        name: module
        for name, module in able.items()
        if name in matched and not any(name.startswith(f"{other}.") for other in matched)
    }


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
