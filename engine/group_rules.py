"""Parameter groups by rule: no decay, options by pattern, layer-wise decay, and all together.

A parameter's group is decided by three questions: which rule takes it, in which layer it lies, and
whether it decays. Parameters with the same three answers share a group.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from phaseloop.engine.errors import ConfigError, listing, nearest

NO_DECAY = "no_decay"
REST = "rest"
BELOW = "below"

_NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.CrossMapLRN2d,
)  # fmt: skip


@dataclass
class LayerDecay:
    """A rate that falls from the top of a network to its bottom.

    Of L layers, the one that n layers lie above gets the rate times factor ** (n + 1); what comes
    before the first layer, such as an embedding, factor ** (L + 1); the rest, such as a head, 1.

    Sources: Clark et al., "ELECTRA", ICLR 2020; Bao et al., "BEiT", ICLR 2022.

    Args:
        factor: above 0 and at most 1.
        layers: patterns of the layers' names, such as ``blocks.*``; a star stands for one part
            of a name. They are ordered as the model has them.
        below: patterns of the parameters that come before the first layer; None: all that the
            model lists before it.
    """

    factor: float
    layers: str | list[str]
    below: str | list[str] | None = None


@dataclass
class GroupRules:
    """How parameters are put into groups.

    Args:
        no_decay: what gets no weight decay: ``norm`` (all of normalization layers), ``bias``,
            ``embedding``, ``vector`` (of one dimension or none), or patterns of parameter names.
        layer_decay: see :class:`LayerDecay`.
        rules: name to rule: ``match``, a pattern of parameter names or several, and options of
            the optimizer for them, or ``<option>_scale``, which multiplies the optimizer's own.
            The first that matches takes a parameter. A star stands for anything.
    """

    no_decay: list[str] = field(default_factory=list)
    layer_decay: LayerDecay | None = None
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self, key: str = "optimizer.groups") -> None:
        """Raises ConfigError for what is wrong with the rules by themselves."""
        decay = self.layer_decay
        if decay is not None and not 0 < decay.factor <= 1:
            raise ConfigError(f"{key}.layer_decay.factor", f"{decay.factor} is not in (0, 1]")
        for name, rule in self.rules.items():
            place = f"{key}.rules.{name}"
            match = rule.get("match")
            listed = match if isinstance(match, list) else [match]
            if not listed or not all(isinstance(pattern, str) for pattern in listed):
                raise ConfigError(f"{place}.match", f"{match!r} is no pattern, nor a list of them")
            if len(rule) == 1:
                raise ConfigError(place, "changes nothing: give options, such as lr_scale")


def parameter_groups(
    model: nn.Module,
    options: Mapping[str, Any],
    rules: GroupRules,
    *,
    criterion: nn.Module | None = None,
    only: Collection[str] | None = None,
    key: str = "optimizer.groups",
) -> list[dict[str, Any]]:
    """Groups for an optimizer, each with a ``name``; every parameter is in exactly one.

    Frozen parameters are in them, too: they cost nothing there, and can be unfrozen later.
    A scaled option is kept with its scale, as ``lr_scale`` say, so that a schedule is multiplied
    by it.

    Args:
        model: whose parameters.
        options: the optimizer's own, by name; those that are scaled must be here.
        rules: how they are put into groups.
        criterion: a loss with parameters; their names begin with ``criterion.``.
        only: names of the parameters to take; None: all.
        key: where the rules stand in the configuration, for messages.

    Raises:
        ConfigError: a pattern that matches nothing, or an option that the optimizer does not have.
    """
    rules.check(key)
    named = _named(model, criterion, only)
    taken = _rule_of(named, rules.rules, key)
    layers = _layer_scales(named, rules.layer_decay, f"{key}.layer_decay")
    kept = _without_decay(model, criterion, named, rules.no_decay, f"{key}.no_decay")
    if rules.no_decay and "weight_decay" not in options:
        raise ConfigError(f"{key}.no_decay", "the optimizer has no option 'weight_decay'")

    groups: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for name, parameter in named.items():
        rule, (layer, scale), decays = taken.get(name, ""), layers[name], name not in kept
        found = groups.get((rule, layer, decays))
        if found is None:
            given = dict(rules.rules[rule]) if rule else {}
            given.pop("match", None)
            found = _options(options, given, scale, decays, f"{key}.rules.{rule}")
            found["name"] = _label(rule, layer, decays)
            groups[rule, layer, decays] = found
        found.setdefault("params", []).append(parameter)
    names = [group["name"] for group in groups.values()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{key}.rules", f"two groups are called {twice!r}; rename the rule")
    return list(groups.values())


def _options(
    options: Mapping[str, Any], given: Mapping[str, Any], scale: float, decays: bool, key: str
) -> dict[str, Any]:
    """A group's own options: as the rule gives them, and scaled."""
    own: dict[str, Any] = {}
    scales: dict[str, float] = {}
    for name, value in given.items():
        option = name.removesuffix("_scale")
        if name in options:
            own[name] = value
        elif option != name and _is_number(options.get(option)):
            if not _is_number(value):
                raise ConfigError(f"{key}.{name}", f"{value!r} is not a number")
            scales[option] = float(value)
        else:
            allowed = (
                "match",
                *options,
                *(f"{o}_scale" for o, v in options.items() if _is_number(v)),
            )
            raise ConfigError(
                f"{key}.{name}",
                f"the optimizer has no such option.{nearest(name, allowed)} "
                f"Allowed: {listing(allowed)}",
            )
    if scale != 1:
        scales["lr"] = scales.get("lr", 1.0) * scale
    if not decays:
        scales["weight_decay"] = 0.0
    for option, factor in scales.items():
        base: Any = own.get(option, options.get(option))
        if not _is_number(base):
            raise ConfigError(key, f"there is no {option} to scale; give the optimizer one")
        own |= {option: base * factor, f"base_{option}": float(base), f"{option}_scale": factor}
    return own


def _named(
    model: nn.Module, criterion: nn.Module | None, only: Collection[str] | None
) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    if criterion is not None:
        for name, parameter in criterion.named_parameters():
            if id(parameter) not in known:
                named[f"criterion.{name}"] = parameter
    return {name: p for name, p in named.items() if only is None or name in only}


def _rule_of(
    named: Mapping[str, Any], rules: Mapping[str, Mapping[str, Any]], key: str
) -> dict[str, str]:
    """Parameter to the name of the first rule that matches it."""
    taken: dict[str, str] = {}
    for rule, options in rules.items():
        matched = _matching(options["match"], named, f"{key}.rules.{rule}.match")
        free = [name for name in matched if name not in taken]
        if not free:
            others = listing({taken[name] for name in matched})
            raise ConfigError(
                f"{key}.rules.{rule}", f"takes nothing: rules before it have all of it: {others}"
            )
        taken.update(dict.fromkeys(free, rule))
    return taken


def _matching(
    patterns: str | Sequence[str], named: Iterable[str], key: str, what: str = ""
) -> list[str]:
    """Names that match one of the patterns, each of which has to match something."""
    names = list(named)
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = _near(pattern, names)
            raise ConfigError(key, f"{pattern!r} {what}matches no parameter. {near}")
        found += matched
    return list(dict.fromkeys(found))


def _near(pattern: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
    return f"The nearest are: {', '.join(close) or 'none'}"


def _layer_scales(
    named: Mapping[str, Any], decay: LayerDecay | None, key: str
) -> dict[str, tuple[str, float]]:
    """Parameter to its layer's name and scale; the name is empty above the layers."""
    if decay is None:
        return dict.fromkeys(named, ("", 1.0))
    patterns = [decay.layers] if isinstance(decay.layers, str) else decay.layers
    inside = {name: _layer(name, patterns) for name in named}
    for pattern in patterns:
        if not any(_layer(name, [pattern]) for name in named):
            raise ConfigError(
                f"{key}.layers", f"{pattern!r} matches no layer. {_near(pattern, list(named))}"
            )
    order = list(dict.fromkeys(layer for layer in inside.values() if layer))
    scales = {layer: decay.factor ** (len(order) - n) for n, layer in enumerate(order)}
    if decay.below is None:
        names = list(named)
        first = next(n for n, name in enumerate(names) if inside[name])
        below = set(names[:first])
    else:
        below = set(_matching(decay.below, named, f"{key}.below"))
    bottom = decay.factor ** (len(order) + 1)
    found: dict[str, tuple[str, float]] = {}
    for name, layer in inside.items():
        if layer:
            found[name] = layer, scales[layer]
        else:
            found[name] = (BELOW, bottom) if name in below else ("", 1.0)
    return found


def _layer(name: str, patterns: Sequence[str]) -> str:
    """The layer that a parameter lies in: so many parts of its name as the pattern has."""
    parts = name.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(parts) > len(wanted) and all(map(fnmatchcase, parts, wanted)):
            return ".".join(parts[: len(wanted)])
    return ""


def _without_decay(
    model: nn.Module,
    criterion: nn.Module | None,
    named: Mapping[str, nn.Parameter],
    what: Sequence[str],
    key: str,
) -> set[str]:
    """Names of the parameters that get no weight decay."""
    found: set[str] = set()
    owners: dict[int, nn.Module] = {}
    for root in (model, *([criterion] if criterion is not None else [])):
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), module)
    kinds: dict[str, Callable[[str, nn.Parameter], bool]] = {
        "norm": lambda name, p: _is_norm(owners[id(p)]),
        "bias": lambda name, p: "bias" in name.split(".")[-1].split("_"),
        "embedding": lambda name, p: isinstance(owners[id(p)], (nn.Embedding, nn.EmbeddingBag)),
        "vector": lambda name, p: p.dim() <= 1,
    }
    for kind in what:
        if kind in kinds:
            found |= {name for name, p in named.items() if kinds[kind](name, p)}
        else:
            found |= set(_matching(kind, named, key, f"is not {listing(kinds)}, and "))
    return found


def _is_norm(module: nn.Module) -> bool:
    """Also one that is none of torch's, by its class's name."""
    return isinstance(module, _NORMS) or type(module).__name__.lower().endswith("norm")


def _label(rule: str, layer: str, decays: bool) -> str:
    parts = [part for part in (rule, layer, "" if decays else NO_DECAY) if part]
    return ".".join(parts) or REST


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
