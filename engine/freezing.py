"""Freezing: parameters that are not trained, named by patterns, and the batch norms among them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from phaseloop.engine.errors import ConfigError, listing

FOR_GOOD = "freeze"
"""Who holds what the root key of this name freezes."""


@dataclass(frozen=True)
class Matched:
    """What some patterns name.

    Attributes:
        parameters: names of parameters.
        norms: names of modules with running statistics, which are frozen with their parameters.
    """

    parameters: frozenset[str]
    norms: frozenset[str]


class Freezing:
    """Who holds which parameters frozen; what nobody holds is as the user had it.

    So one that several hold is woken by the last of them only, and what is held for good, or was
    frozen before the run, by none.

    Args:
        modules: prefix to module, see
            :func:`~phaseloop.engine.checkpoint.optimizer_state.parameter_names`.
        patterns: what is frozen for good.

    Raises:
        ConfigError: a pattern matches nothing; the message gives the nearest names.
    """

    def __init__(self, modules: Mapping[str, nn.Module], patterns: Sequence[str] = ()) -> None:
        self._roots = dict(modules)
        self._parameters: dict[str, nn.Parameter] = {}
        self._modules: dict[str, nn.Module] = {}
        self._never = Matched(frozenset(), frozenset())
        self._find()
        self._holds = {FOR_GOOD: self.match(patterns, FOR_GOOD)}

    def begin(self) -> None:
        """The model is where it will be trained: note what is frozen already, and freeze."""
        self._find()
        self._never = Matched(
            frozenset(name for name, p in self._parameters.items() if not p.requires_grad),
            frozenset(name for name, module in self._modules.items() if not module.training),
        )
        self.apply()

    def match(self, patterns: Sequence[str], key: str) -> Matched:
        """What the patterns name: parameters, or modules with all that is below them.

        Args:
            patterns: as of ``fnmatch``: ``backbone.*``, ``*.bias``.
            key: where they stand, for messages.

        Raises:
            ConfigError: no list of strings, or one of them matches nothing.
        """
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise ConfigError(key, f"give a list of patterns, not {patterns!r}")
        parameters: set[str] = set()
        below: set[str] = set()
        for pattern in patterns:
            modules = {name for name in self._modules if name and fnmatchcase(name, pattern)}
            modules |= {name for name in self._modules if _is_below(name, modules)}
            named = {
                name
                for name in self._parameters
                if fnmatchcase(name, pattern) or _is_below(name, modules)
            }
            if not named and not any(self._norms(named, modules)):
                raise ConfigError(key, self._nothing(pattern))
            parameters |= named
            below |= modules
        return Matched(frozenset(parameters), frozenset(self._norms(parameters, below)))

    def hold(self, owner: str, matched: Matched) -> None:
        """Freeze, until ``owner`` lets go."""
        self._holds[owner] = matched
        self.apply()

    def release(self, owner: str) -> None:
        """``owner`` lets go: what nobody else holds is trained."""
        matched = self._holds.pop(owner, None)
        if matched is None:
            return
        for name in matched.parameters - self._never.parameters:
            self._parameters[name].requires_grad_(True)
        for name in matched.norms - self._never.norms:
            self._modules[name].training = True
        self.apply()

    def apply(self) -> None:
        """Freeze what is held, whoever may have woken it."""
        for matched in self._holds.values():
            for name in matched.parameters:
                self._parameters[name].requires_grad_(False)
            for name in matched.norms:
                self._modules[name].training = False

    def for_good(self) -> list[str]:
        """Names of the parameters that are frozen for good."""
        return sorted(self._holds[FOR_GOOD].parameters)

    def check_left(self, trained: Iterable[nn.Parameter], matched: Matched, key: str) -> None:
        """Raises ConfigError where freezing ``matched`` leaves nothing of ``trained``."""
        ids = {id(self._parameters[name]) for name in matched.parameters}
        if not any(p.requires_grad and id(p) not in ids for p in trained):
            raise ConfigError(key, "the patterns freeze all that the optimizer has to train")

    def _find(self) -> None:
        for prefix, root in self._roots.items():
            start = f"{prefix}." if prefix else ""
            for name, module in root.named_modules():
                self._modules[f"{start}{name}" if name else prefix] = module
            for name, parameter in root.named_parameters(remove_duplicate=False):
                self._parameters[f"{start}{name}"] = parameter

    def _norms(self, parameters: set[str], modules: set[str]) -> Iterable[str]:
        for name, module in self._modules.items():
            if not isinstance(getattr(module, "running_mean", None), Tensor):
                continue
            own = {f"{name}.{key}" if name else key for key, _ in module.named_parameters()}
            if name in modules or (own and own <= parameters):
                yield name

    def _nothing(self, pattern: str) -> str:
        parts = [name.split(".") for name in self._parameters]
        modules = {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}
        names = [*self._parameters, *modules]
        close = difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.4)
        hint = (
            f"Nearest: {', '.join(close)}"
            if close
            else f"There are: {listing({name.split('.')[0] for name in names})}"
        )
        return f"the pattern {pattern!r} matches no parameter and no module with parameters. {hint}"


def _is_below(name: str, modules: Iterable[str]) -> bool:
    """Whether one of the modules contains ``name``."""
    return any(name.startswith(f"{module}.") for module in modules)
