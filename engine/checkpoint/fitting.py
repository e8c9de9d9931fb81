"""Fitting: weights from elsewhere compared with a model, name by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phaseloop.engine.errors import ConfigError, listing, nearest

if TYPE_CHECKING:
    from phaseloop.engine.checkpoint.source import Source
    from phaseloop.engine.checkpoint.weights import Weights

_SHOWN = 3  # names of each kind in an error
_CANDIDATES = 24  # prefixes that are tried for a hint
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class WeightsReport:
    """What came of every name.

    Attributes:
        place: what was read.
        total: names in the model's ``state_dict``.
        loaded: names that have their values from there, also through a tensor that they share.
        missing: names of the model that are not there.
        unexpected: names there that the model does not have.
        misfits: names in both, of another shape or kind; each with what is here and there.
        left: names of the model that were not asked for.
        converted: ``float16 -> float32`` to how many tensors were.
    """

    place: str
    total: int
    loaded: Sequence[str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    misfits: Mapping[str, str]
    left: Sequence[str]
    converted: Mapping[str, int]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, most: int | None = None) -> Iterator[str]:
        """In words.

        Args:
            most: names in a line; None: all.
        """
        yield f"weights     {self.count} tensors of the model from {self.place}"
        misfits = [f"{name} ({said})" for name, said in self.misfits.items()]
        for label, names in (
            ("missing there", self.missing),
            ("not in the model", self.unexpected),
            ("do not fit", misfits),
            ("not asked for", self.left),
            *([] if most is not None else [("loaded", self.loaded)]),
        ):
            if names:
                yield f"            {label} ({len(names)}): {_some(names, most)}"
        for kinds, count in self.converted.items():
            yield f"            converted ({count}): {kinds}"

    @property
    def count(self) -> str:
        """``12 of 14``."""
        return f"{len(self.loaded)} of {self.total}"

    def problems(self, allow: Sequence[str]) -> list[str]:
        """What no pattern of ``allow`` names, in words."""
        found = []
        for label, names in (
            ("missing there", self.missing),
            ("not in the model", self.unexpected),
        ):
            if bad := [name for name in names if not _is_named(name, allow)]:
                found.append(f"{label} ({len(bad)}): {_some(bad, _SHOWN)}")
        bad = [f"{n} has {s}" for n, s in self.misfits.items() if not _is_named(n, allow)]
        return found + ([_some(bad, _SHOWN)] if bad else [])


def compare(
    model: nn.Module, weights: Weights, found: Source, key: str
) -> tuple[dict[str, Any], WeightsReport]:
    """What fits, by the model's names, and what came of every name."""
    here: dict[str, Any] = model.state_dict(keep_vars=True)
    renamed = _renamed(found, weights, key)
    _check_patterns(weights, [*here, *renamed], key)
    there = {name: v for name, v in renamed.items() if _is_named(name, weights.include)}
    asked = {name: v for name, v in here.items() if _is_named(name, weights.include)}
    misfits = {
        name: said
        for name, value in asked.items()
        if name in there and (said := _misfit(name, value, there[name]))
    }
    chosen = {name: there[name] for name in asked if name in there and name not in misfits}
    missing = [name for name in asked if name not in there]
    tied = _settle_ties(asked, chosen, misfits, weights.allow)
    return chosen, WeightsReport(
        place=found.place,
        total=len(here),
        loaded=[name for name in asked if name in chosen or name in tied],
        missing=[name for name in missing if name not in tied],
        unexpected=[name for name in there if name not in here],
        misfits=misfits,
        left=[name for name in here if name not in asked],
        converted=dict(_conversions(asked, chosen)),
    )


def _renamed(found: Source, weights: Weights, key: str) -> dict[str, Any]:
    """The state by the names that the options make of its own."""
    prefix, rename = weights.remove_prefix, weights.rename
    if prefix and not any(name.startswith(prefix) for name in found.state):
        raise ConfigError(
            f"{key}.remove_prefix",
            f"no name in {found.place} begins with {prefix!r}. They are like: "
            f"{_some(list(found.state), _SHOWN)}",
        )
    result: dict[str, Any] = {}
    used = set()
    for old, value in found.state.items():
        name = old.removeprefix(prefix)
        for pattern, replacement in rename.items():
            name, count = re.subn(pattern, replacement, name)
            used.update([pattern] if count else [])
        name = weights.add_prefix + name
        if name in result:
            raise ConfigError(key, f"two names in {found.place} would be {name!r}")
        result[name] = value
    if unused := [pattern for pattern in rename if pattern not in used]:
        raise ConfigError(f"{key}.rename", f"{unused[0]!r} is in no name of {found.place}")
    return result


def _check_patterns(weights: Weights, names: Sequence[str], key: str) -> None:
    for option in ("include", "allow"):
        for pattern in getattr(weights, option):
            if not any(_is_named(name, [pattern]) for name in names):
                near = nearest(pattern.strip("*."), names)
                tops = {name.split(".")[0] for name in names}
                raise ConfigError(
                    f"{key}.{option}",
                    f"the pattern {pattern!r} matches no name, neither of the model nor there."
                    f"{near} They begin with: {listing(tops)[:300]}",
                )


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name, or that of a module above it."""
    parts = name.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatchcase(part, pattern) for pattern in patterns for part in above)


def _misfit(name: str, here: Any, there: Any) -> str:
    """Why a value cannot be loaded; empty: it can."""
    if name.rpartition(".")[2] == _EXTRA:  # whatever its module makes of it
        return ""
    if not isinstance(there, Tensor):
        return f"a tensor here, a {type(there).__name__} there"
    if here.shape != there.shape:
        return f"{list(here.shape)} here, {list(there.shape)} there"
    if there.layout != here.layout or there.is_meta:  # could not be copied
        return f"{_layout(here)} here, {_layout(there)} there"
    if _kind(here) != _kind(there):
        return f"{_dtype(here)} here, {_dtype(there)} there"
    return ""


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.is_complex():
        return "complex"
    return "float" if tensor.is_floating_point() else "int"


def _layout(tensor: Tensor) -> str:
    return "no values" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _settle_ties(
    asked: Mapping[str, Any], chosen: dict[str, Any], misfits: dict[str, str], allow: Sequence[str]
) -> set[str]:
    """Names that share a tensor: one value for all of them; those that need none of their own.

    Where the values differ, those whose names are allowed to are left out.
    """
    groups: dict[int, list[str]] = {}
    for name, value in asked.items():
        if isinstance(value, Tensor):
            groups.setdefault(id(value), []).append(name)
    tied: set[str] = set()
    for names in groups.values():
        given = [name for name in names if name in chosen]
        if len(names) == 1 or not given:
            continue
        first = next((name for name in given if not _is_named(name, allow)), given[0])
        for name in given:
            if name != first and not _same(chosen[name], chosen[first]):
                misfits[name] = f"one tensor with {first} here, another there"
                del chosen[name]
        tied.update(name for name in names if name not in misfits)
    return tied


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _conversions(asked: Mapping[str, Any], chosen: Mapping[str, Any]) -> Counter[str]:
    return Counter(
        f"{_dtype(value)} -> {_dtype(asked[name])}"
        for name, value in chosen.items()
        if isinstance(value, Tensor) and value.dtype != asked[name].dtype
    )


def without_values(chosen: Mapping[str, Any]) -> str:
    """The first names whose tensors have NaN in them; empty: none has."""
    return _some([name for name, value in chosen.items() if _has_nan(value)], _SHOWN)


def _has_nan(value: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    one_byte = value.element_size() == 1  # of these torch compares nothing
    return bool((value.float() if one_byte else value).isnan().any())


def _some(names: Sequence[str], most: int | None) -> str:
    shown = list(names if most is None else names[:most])
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


# --- hints ---


def hint(model: nn.Module, weights: Weights, found: Source, report: WeightsReport) -> str:
    """The prefixes with which most names would match, if they do so now less than half."""
    here = {name for name in model.state_dict() if _is_named(name, weights.include)}
    if 2 * len(report.loaded) > len(here):
        return ""
    best, most = "", max(len(report.loaded), len(here) // 2)
    for remove in ["", *_prefixes(found.state)]:
        names = [name.removeprefix(remove) for name in found.state if name.startswith(remove)]
        for add in ["", *_prefixes(here)]:
            if (count := sum(add + name in here for name in names)) > most:
                said = [f"remove_prefix: {remove!r}" if remove else ""]
                said += [f"add_prefix: {add!r}" if add else ""]
                best, most = " and ".join(filter(None, said)), count
    return f" With {best}, {most} names would match." if best else ""


def _prefixes(names: Iterable[str]) -> list[str]:
    """What several names begin with, up to a dot, the commonest first."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")[:-1]
        counts.update(f"{'.'.join(parts[:depth])}." for depth in range(1, len(parts) + 1))
    return [prefix for prefix, _ in counts.most_common(_CANDIDATES)]
