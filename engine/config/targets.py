"""Targets: what ``_target_`` may name, judged by where it really lives.

``_target_`` names code that will run, with options of the configuration's author. So it must be a
class or function of a package that they may use: torch's layers, optimizers and data tools,
torchmetrics, phaseloop, what ``imports`` names, and what ``allow_targets`` adds. A module holds
names of other modules too (``torch.utils.data.dataloader.os.system``): where a thing is defined
counts, and not the path by which it was found.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phaseloop.engine import registry
from phaseloop.engine.errors import ConfigError, listing

ALLOWED = ("torch.nn", "torch.optim", "torch.utils.data", "torchmetrics", "phaseloop")

# The first unpickle what they are given; the second run the code of a model that they download.
_REFUSED = ("torch.utils.data.datapipes", "torchmetrics.multimodal")
# Functions there make no metric, but reach for files and for models elsewhere.
_CLASSES_ONLY = ("torchmetrics",)
_OURS = "phaseloop"
_OUR_PARTS = ("phaseloop.hooks", "phaseloop.train_steps", "phaseloop.recipes")


class Targets:
    """Finds what ``_target_`` names, if it may.

    Args:
        imports: names of the imported modules; their packages are allowed, but for Python's own
            library and those packages of which only parts are.
        allow_targets: packages and modules whose own classes and functions are allowed besides,
            and full names of single ones, wherever these live.
    """

    def __init__(self, imports: Iterable[str] = (), allow_targets: Sequence[str] = ()) -> None:
        tops = [module.split(".")[0] for module in imports]
        shipped = {name.split(".")[0] for name in ALLOWED} | set(sys.stdlib_module_names)
        self._own = tuple(dict.fromkeys([*(t for t in tops if t not in shipped), *allow_targets]))

    def find(self, path: Any, key: str) -> Callable[..., Any]:
        """The class or function at a dotted path.

        Raises:
            ConfigError: there is none, or it may not be named; the message says what to add to
                ``allow_targets``.
        """
        if not isinstance(path, str) or not all(map(str.isidentifier, path.split("."))):
            raise ConfigError(key, f"{path!r} is not the full name of a class or function")
        if "." not in path:
            raise ConfigError(key, f"{path!r} is not the full name of a class or function")
        own = _is_in(path, self._own)
        if not own and not _is_in(path, ALLOWED):
            raise self._refusal(path, path, key)
        if not own and any(part.startswith("_") for part in path.split(".")):
            raise self._refusal(path, path, key)  # before anything is imported
        found = _import_object(path, key)
        if not callable(found):
            raise ConfigError(key, f"{path} is not a class or function")
        home = _home(found)
        if not (path in self._own or _is_in(home, self._own) or _may_be_named(found, home)):
            raise self._refusal(path, home, key)
        target: Callable[..., Any] = found
        return target

    def _refusal(self, path: str, home: str, key: str) -> ConfigError:
        lives = f" (it is {home})" if home not in ("", path) else ""
        return ConfigError(
            key,
            f"{path}{lives} is not in a package that may be named here "
            f"({listing((*ALLOWED, *self._own))}), or not one of its public classes; "
            f"_target_ runs code: add {path!r} to allow_targets if you trust it",
        )


def _is_in(path: str, packages: Iterable[str]) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)


def _home(found: Any) -> str:
    """Module and name of a thing, where it is defined; empty where it does not know."""
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not isinstance(module, str):
        return ""
    return f"{module}.{name}" if isinstance(name, str) else module


def _may_be_named(found: Any, home: str) -> bool:
    """Whether it is a public class or function of the packages that are always allowed."""
    if not isinstance(found, (type, types.FunctionType)) or not _is_in(home, ALLOWED):
        return False
    name = found.__qualname__
    if "." in name or name.startswith("_") or _is_in(home, _REFUSED):  # a dot: a method
        return False
    if _is_in(home, (_OURS,)):
        return _is_registered(found) or (isinstance(found, type) and _is_public(found, home))
    return isinstance(found, type) or not _is_in(home, _CLASSES_ONLY)


def _is_public(found: type, home: str) -> bool:
    engine = importlib.import_module("phaseloop.engine")
    name = found.__name__
    return _is_in(home, _OUR_PARTS) or (
        name in engine.__all__ and getattr(engine, name, None) is found
    )


def _is_registered(found: Any) -> bool:
    kinds = [kind for kind in vars(registry).values() if isinstance(kind, registry.Registry)]
    return any(entry.target is found for kind in kinds for entry in kind)


def _import_object(path: str, key: str) -> Any:
    """The object at a dotted path, importing as many leading parts as are modules."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                close = difflib.get_close_matches(part, dir(found), n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(key, f"{path}: there is no {part!r}.{hint}")
            found = getattr(found, part)
        return found
    raise ConfigError(key, f"{path}: there is no module {parts[0]!r}")
