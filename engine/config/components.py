"""Components: ``{name: ...}`` or ``{_target_: ...}`` into objects, by this one function.

What ``_target_`` may name is the business of :mod:`phaseloop.engine.config.targets`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phaseloop.engine.config.targets import Targets
from phaseloop.engine.config.typed import convert
from phaseloop.engine.errors import ConfigError, RegistryError, listing, nearest
from phaseloop.engine.registry import Registry


class Components:
    """Makes the objects of one configuration.

    Args:
        imports: modules and files whose import registers components; their packages are allowed.
        allow_targets: further packages that ``_target_`` may name.
    """

    def __init__(self, imports: Sequence[str] = (), allow_targets: Sequence[str] = ()) -> None:
        self._targets = Targets([import_module(name) for name in imports], allow_targets)

    def check(
        self,
        spec: Any,
        registry: Registry,
        key: str,
        given: int = 0,
        default_name: str | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        """Check a component without making it.

        Args:
            spec: the mapping.
            registry: where ``name`` is looked up.
            key: where it stands in the configuration.
            given: how many leading arguments the engine will give itself.
            default_name: the name where the mapping has none.
            extra: options that the engine takes for itself and the target does not get.

        Raises:
            ConfigError: no such name or target, an option that it does not take, a wrong type, a
                missing option.
        """
        target, options = self._split(spec, registry, key, default_name)
        options = {k: v for k, v in options.items() if k not in extra}
        self._check_options(target, options, key, given, extra)

    def make(
        self,
        spec: Any,
        registry: Registry,
        key: str,
        *args: Any,
        default_name: str | None = None,
        extra: Sequence[str] = (),
    ) -> Any:
        """Make the object that ``spec`` describes; arguments as for :meth:`check`."""
        self.check(spec, registry, key, len(args), default_name, extra)
        target, options = self._split(spec, registry, key, default_name)
        made = {k: self._nested(v, f"{key}.{k}") for k, v in options.items() if k not in extra}
        try:
            return target(*args, **made)
        except ValueError as error:  # what torch raises for a negative learning rate, say
            raise ConfigError(key, str(error)) from error

    def options(self, spec: Any, registry: Registry, key: str) -> list[str]:
        """Names of the options that the component's class or function names itself."""
        parameters = _parameters(self.target(spec, registry, key, None), 0)
        return [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]

    def target(self, spec: Any, registry: Registry, key: str, default_name: str | None) -> Any:
        """The function or class that ``spec`` names, not called."""
        return self._split(spec, registry, key, default_name)[0]

    def _split(
        self, spec: Any, registry: Registry, key: str, default_name: str | None
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        if not isinstance(spec, Mapping):
            raise ConfigError(key, f"{spec!r} is not a mapping with a name or a _target_")
        options = {str(k): v for k, v in spec.items() if k not in ("name", "_target_")}
        if "_target_" in spec:
            if "name" in spec:
                options["name"] = spec["name"]
            return self._targets.find(spec["_target_"], f"{key}._target_"), options
        name = spec.get("name", default_name)
        if not isinstance(name, str):
            raise ConfigError(
                f"{key}.name", f"give the name of a {registry.kind}: {_names(registry)}"
            )
        try:
            return registry.get(name).target, options
        except RegistryError as error:
            raise ConfigError(f"{key}.name" if "name" in spec else key, str(error)) from None

    def _check_options(
        self,
        target: Callable[..., Any],
        options: Mapping[str, Any],
        key: str,
        given: int,
        extra: Sequence[str] = (),
    ) -> None:
        parameters = _parameters(target, given)
        label = getattr(target, "__name__", str(target))
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {
            n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        hints = _hints(target)
        for option, value in options.items():
            if option in named:
                self._check_value(hints.get(option, Any), value, f"{key}.{option}")
            elif takes_any:
                self._check_nested(value, f"{key}.{option}")
            else:
                raise ConfigError(
                    f"{key}.{option}",
                    f"{label} takes no option {option!r}.{nearest(option, [*named, *extra])} "
                    f"It takes: {listing([*named, *extra])}",
                )
        for option, parameter in named.items():
            if parameter.default is parameter.empty and option not in options:
                raise ConfigError(f"{key}.{option}", f"{label} needs a value")

    def _check_value(self, hint: Any, value: Any, key: str) -> None:
        if not self._check_nested(value, key):
            convert(hint, value, key)

    def _check_nested(self, value: Any, key: str) -> bool:
        """Check the components that an option is or holds; whether it is one itself."""
        if isinstance(value, list):
            for number, item in enumerate(value):
                self._check_nested(item, f"{key}.{number}")
        elif isinstance(value, Mapping):
            options = {k: v for k, v in value.items() if k != "_target_"}
            if "_target_" in value:
                target = self._targets.find(value["_target_"], f"{key}._target_")
                self._check_options(target, options, key, 0)
                return True
            for name, item in options.items():
                self._check_nested(item, f"{key}.{name}")
        return False

    def _nested(self, value: Any, key: str) -> Any:
        """Options may hold components by ``_target_`` themselves, in lists and mappings too."""
        if isinstance(value, list):
            return [self._nested(item, f"{key}.{n}") for n, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        options = {k: self._nested(v, f"{key}.{k}") for k, v in value.items() if k != "_target_"}
        if "_target_" not in value:
            return options
        target = self._targets.find(value["_target_"], f"{key}._target_")
        self._check_options(target, options, key, 0)
        return target(**options)


def import_module(name: str) -> str:
    """Import a module, or a plain file given as ``./my_steps.py``; its module name.

    Raises:
        ConfigError: it cannot be found, or fails while it is imported.
    """
    if not name.endswith(".py"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            raise ConfigError("imports", f"no module is called {name!r} ({error})") from None
        return name
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError("imports", f"there is no file {path}")
    module_name = path.stem
    known = sys.modules.get(module_name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return module_name
        raise ConfigError(
            "imports", f"{name}: a module called {module_name!r} exists already; rename the file"
        )
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module_name


def _parameters(target: Callable[..., Any], given: int) -> dict[str, inspect.Parameter]:
    """What a user may give: the parameters without the ``given`` first."""
    try:
        parameters = list(inspect.signature(target).parameters.items())
    except ValueError:  # some of C's functions do not tell: they are given what the user gives
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}
    return dict(parameters[given:])


@functools.cache
def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    try:
        return typing.get_type_hints(function)
    except Exception:  # a name that exists for type checkers only: then nothing is checked
        return {}


def _names(registry: Registry) -> str:
    return listing(entry.name for entry in registry)
