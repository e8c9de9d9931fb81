"""Units: the parts of a model whose parameters are gathered, used and let go of together.

The smaller the units, the less memory the whole parameters take at a time, and the more messages
there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from phaseloop.engine.errors import ConfigError, listing, nearest

KEY = "backend.shard"

_APART = (
    "and backend fsdp would make it two: the model has no forward, so its parts are cut one by "
    "one; give it a forward that calls them, or use backend=ddp"
)

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def roots_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that steps call as a whole, by name.

    That is the model; or, where it has no forward and only holds others together, such as a
    generator and a discriminator, each of these.

    Raises:
        ConfigError: a parameter is in two of them, or in one and in what holds them.
    """
    found: dict[nn.Module, str] = {}
    for name, module in _callable(model, ""):
        found.setdefault(module, name)
    roots = {name: module for module, name in found.items()}
    if "" not in roots:
        _check_apart(model, roots)
    return roots


def _check_apart(model: nn.Module, roots: Mapping[str, nn.Module]) -> None:
    """Each root's parameters are cut by themselves: one in two places would become two."""
    inside = {module for root in roots.values() for module in root.modules()}
    owner: dict[int, tuple[str, str]] = {}
    for part, root in {**roots, "": model}.items():
        for name, module in root.named_modules(prefix=part):
            if root is model and module in inside:
                continue
            for short, parameter in module.named_parameters(name, recurse=False):
                first, other = owner.setdefault(id(parameter), (short, part))
                if other != part and parameter.dim():
                    raise ConfigError("model", f"{first} and {short} are one parameter, {_APART}")


def _callable(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if _has_forward(module):
        yield name, module
        return
    for short, child in module.named_children():
        if _is_large(child):
            yield from _callable(child, f"{name}.{short}" if name else short)


def units_of(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The modules that are units of their own, by name, those inside others first.

    What is in none is a unit together.

    Args:
        model: a root with all that is below it.
        patterns: of module names, such as ``layers.*``; none: what stands in the outermost
            ``ModuleList``, ``ModuleDict`` and ``Sequential`` (the blocks of most networks), but
            for modules that share a parameter with others.

    Raises:
        ConfigError: a pattern names no module that can be a unit.
    """
    if not patterns:
        chosen = dict(_blocks(model, ""))
        shared = _shared(model, chosen)
        chosen = {name: module for name, module in chosen.items() if name not in shared}
    else:
        chosen = _named(model, patterns)
        if shared := _shared(model, chosen):
            name, other = next(iter(shared.items()))
            raise ConfigError(
                KEY, f"{name} shares {other} with a module outside of it: leave it out of the units"
            )
    return dict(sorted(chosen.items(), key=lambda item: -item[0].count(".")))


def _blocks(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for short, child in module.named_children():
        full = f"{name}.{short}" if name else short
        if isinstance(module, _LISTS) and _is_large(child) and _has_forward(child):
            yield full, child
        else:
            yield from _blocks(child, full)


def _named(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    able = {
        name: module
        for name, module in model.named_modules()
        if name and _is_large(module) and _has_forward(module)
    }
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = {name: module for name, module in able.items() if fnmatchcase(name, pattern)}
        if not matched:
            raise ConfigError(
                KEY,
                f"{pattern!r} matches no module with a forward and parameters."
                f"{nearest(pattern, able)} There are: {listing(able)}",
            )
        found.update(matched)
    return found


def _shared(model: nn.Module, chosen: Mapping[str, nn.Module]) -> dict[str, str]:
    """Units that hold a parameter which other modules hold too, with its name."""
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    found: dict[str, str] = {}
    for name, unit in chosen.items():
        inside = Counter(id(p) for m in unit.modules() for p in m.parameters(recurse=False))
        for short, parameter in unit.named_parameters():
            if inside[id(parameter)] < holders[id(parameter)]:
                found.setdefault(name, f"{name}.{short}")
    return found


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_large(module: nn.Module) -> bool:
    """There is something to shard in it."""
    return any(parameter.dim() for parameter in module.parameters())
