"""Defaults: what each key of a configuration is where nobody says it."""

from __future__ import annotations

import dataclasses
from typing import Any


def defaults(part: Any) -> Any:
    """The defaults of a checked configuration, as plain Python in its shape.

    Of each dataclass in it the keys that have a default. An entry of a list keeps its own
    ``name``, by which it is found again.

    Args:
        part: a dataclass, or a dict or list with dataclasses in it.
    """
    if isinstance(part, dict):
        return {key: defaults(item) for key, item in part.items() if _has_keys(item)}
    if isinstance(part, list):
        return [defaults(item) for item in part if _has_keys(item)]
    found = {"name": part.name} if hasattr(part, "name") else {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if _has_keys(value):
            found[field.name] = defaults(value)
        elif field.name not in found:
            found.update(_default(field))
    return found


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The field's name and default, if it has one."""
    if field.default is not dataclasses.MISSING:
        return {field.name: field.default}
    if field.default_factory is not dataclasses.MISSING:
        return {field.name: field.default_factory()}
    return {}


def _has_keys(value: Any) -> bool:
    """There is a dataclass in it."""
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        return any(_has_keys(item) for item in items)
    return dataclasses.is_dataclass(value)
