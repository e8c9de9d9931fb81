"""Typed: plain containers into dataclasses and options; nothing guessed, no key unaccounted."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from phaseloop.engine.errors import ConfigError, listing, nearest

T = TypeVar("T")
MISSING = "???"
_PLAIN = (bool, int, float, str, type(None), list, dict)


def to_dataclass(cls: type[T], value: Any, path: str) -> T:
    """An instance of the dataclass ``cls`` from a mapping.

    Raises:
        ConfigError: an unknown key (the nearest right one is named), a missing value, a wrong type,
            or ``cls`` itself refuses a value.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(path, f"{value!r} is not a mapping of {listing(_names(cls))}")
    names = _names(cls)
    check_keys(value, names, path)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        # A field may choose among its types itself, where the value does not tell them apart.
        if "choose" in f.metadata and f.name in value:
            hints[f.name] = f.metadata["choose"](value[f.name])
    converted = {
        key: convert(hints[key], item, f"{path}.{key}" if path else key)
        for key, item in value.items()
    }
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in converted:
            raise ConfigError(f"{path}.{f.name}" if path else f.name, "a value is needed")
    try:
        return cls(**converted)
    except ValueError as error:  # of a number out of range, where the class checks its own
        raise ConfigError(path, str(error)) from error


def check_keys(value: Mapping[str, Any], allowed: collections.abc.Iterable[str], path: str) -> None:
    """Raises ConfigError for the first key that is not allowed."""
    names = list(allowed)
    for key in value:
        if key not in names:
            raise ConfigError(
                f"{path}.{key}" if path else str(key),
                f"there is no such key.{nearest(str(key), names)} Allowed: {listing(names)}",
            )


def convert(annotation: Any, value: Any, path: str) -> Any:
    """``value`` as ``annotation`` asks for it; only an int where a float is due is changed.

    Raises:
        ConfigError: it is of another type, or missing.
    """
    if value == MISSING and isinstance(value, str):
        raise ConfigError(path, "a value is needed (it is ??? in the file)")
    if annotation is Any:
        return value
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(annotation), value, path)
    if origin is typing.Literal:
        return _convert_literal(typing.get_args(annotation), value, path)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return to_dataclass(annotation, value, path)
    if origin in (list, collections.abc.Sequence) or annotation is list:
        return _convert_list(typing.get_args(annotation), value, path)
    if origin in (dict, collections.abc.Mapping) or annotation is dict:
        return _convert_dict(typing.get_args(annotation), value, path)
    if annotation is float and type(value) is int:
        return float(value)
    if annotation in _PLAIN or annotation is None:
        return _check_plain(annotation, value, path)
    # Any other type is the business of whoever takes it.
    return value


def describe(annotation: Any) -> str:
    """A type in a reader's words: ``int or null``."""
    if annotation in (None, type(None)):
        return "null"
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if typing.get_origin(annotation) in (list, collections.abc.Sequence):
        return f"list of {describe(args[0])}" if args else "list"
    if dataclasses.is_dataclass(annotation):
        return f"a mapping of {listing(_names(annotation))}"
    return getattr(annotation, "__name__", str(annotation)).replace("dict", "mapping")


def _convert_union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    optional = type(None) in members
    if value is None and optional:
        return None
    problems = []
    members = tuple(member for member in members if member is not type(None))
    classes = [member for member in members if dataclasses.is_dataclass(member)]
    if isinstance(value, Mapping) and len(classes) == 1:  # its own errors say more
        return convert(classes[0], value, path)
    for member in sorted(members, key=lambda m: m is not type(value)):  # an exact match first
        if not _is_ours(member) and type(value) in (bool, int, float, str, list, type(None)):
            continue  # a tensor, a callable: no plain value is one
        try:
            return convert(member, value, path)
        except ConfigError as error:
            problems.append(error)
    if len(problems) == 1 and len(members) == 1 and not _is_scalar(members[0]):
        raise problems[0]
    wanted = [describe(member) for member in members] + (["null"] if optional else [])
    raise ConfigError(path, _wrong(value, " or ".join(wanted)))


def _is_scalar(annotation: Any) -> bool:
    return annotation in (bool, int, float, str)


def _convert_literal(allowed: tuple[Any, ...], value: Any, path: str) -> Any:
    if value not in allowed:
        raise ConfigError(path, _wrong(value, " or ".join(repr(a) for a in allowed)))
    return value


def _convert_list(args: tuple[Any, ...], value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(path, _wrong(value, "a list"))
    kind = args[0] if args else Any
    return [convert(kind, item, f"{path}.{_label(n, item)}") for n, item in enumerate(value)]


def _label(number: int, item: Any) -> str:
    """An entry's own name, where it has one: ``phases.warm``."""
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) and name else str(number)


def _convert_dict(args: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, _wrong(value, "a mapping"))
    kind = args[1] if len(args) == 2 else Any
    name = _as_int if args and args[0] is int else _as_str
    return {name(key, path): convert(kind, item, f"{path}.{key}") for key, item in value.items()}


def _as_str(key: Any, path: str) -> str:
    return str(key)


def _as_int(key: Any, path: str) -> int:
    try:
        return int(str(key))
    except ValueError:
        raise ConfigError(path, f"its keys are whole numbers, and {key!r} is none") from None


def _check_plain(annotation: Any, value: Any, path: str) -> Any:
    expected = type(None) if annotation is None else annotation
    if type(value) is not expected:
        raise ConfigError(path, _wrong(value, describe(annotation)))
    return value


def _wrong(value: Any, wanted: str) -> str:
    quoted = " (it is quoted: a string)" if isinstance(value, str) and _is_number(value) else ""
    shown = "null" if value is None else repr(value)
    return f"{shown}{quoted} is not {wanted}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_ours(annotation: Any) -> bool:
    return (
        annotation in _PLAIN
        or annotation is None
        or typing.get_origin(annotation) is not None
        or dataclasses.is_dataclass(annotation)
    )


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.init]
