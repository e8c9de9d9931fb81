"""What may change between a run and its continuation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phaseloop.engine import registry

# A path here, or anything below it. A star stands for one name.
MAY_CHANGE = (
    "phases.epochs", "phases.updates", "phases.min_epochs", "phases.min_updates",
    "phases.test_every_epochs", "phases.test_every_updates",
    "phases.time", "phases.test_every_time", "phases.test_at_start",
    "phases.*.epochs", "phases.*.updates", "phases.*.time",
    "phases.*.min_epochs", "phases.*.min_updates",
    "phases.*.test_every_epochs", "phases.*.test_every_updates", "phases.*.test_every_time",
    "phases.*.test_at_start", "phases.*.test_sets",
    "run", "backend", "launch", "plan", "only", "weights", "debug.fast", "imports", "allow_targets",
    "data.*.workers", "data.*.prefetch", "data.*.pin_memory",
    "data.*.micro_batch_size", "data.*.accumulate",
    *(f"phases.*.data.train.{key}" for key in
      ("workers", "prefetch", "pin_memory", "micro_batch_size", "accumulate")),
    "data.test.*.workers", "data.test.*.prefetch", "data.test.*.pin_memory",
    "data.test.*.micro_batch_size", "data.test.*.accumulate",
    "model.compile", "model.checkpoint",
    "model.weights",  # resume.py compares the bytes
)  # fmt: skip


# Hooks that may be changed, added or left out, beside those that declare that they only watch.
FREE_HOOKS = ("early_stop", "checkpoint", "non_finite", "fit_memory")

# Keys that a configuration may still have in an old checkpoint, and the default that each had when
# it was given up: a run that never changed it goes on without it.
GONE: dict[str, Any] = {}


def forbidden_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> list[str]:
    """Differences that would make another training of it, as ``path: before -> now``.

    Args:
        before, now: what the checkpoint has, and what the run has now.
        defaults: what keys of ``now`` are where nobody says them. A key that the checkpoint does
            not know, since it was made by an earlier version, stood at it.
    """
    return [
        f"{path}: {_show(old)} -> {_show(new)}"
        for path, old, new in _differences(before, now, defaults or {}, "")
        if not _may_change(path, before, now)
    ]


_MISSING = object()

_COMPONENTS = ("dataset", "collate", "to_device")
"""Keys of a set whose options are a user's own: no star stands for one."""


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*before, *now]):
        path = f"{prefix}{key}"
        old, new = by_name(before.get(key, _MISSING)), by_name(now.get(key, _MISSING))
        default = by_name(defaults.get(key, _MISSING))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            below = default if isinstance(default, Mapping) else {}
            yield from _differences(old, new, below, f"{path}.")
        elif not _same(path, old, new, default):
            yield path, old, new


def _same(path: str, old: Any, new: Any, default: Any) -> bool:
    if old is _MISSING and default is not _MISSING:
        old = default
    if new is _MISSING and path in GONE:
        new = GONE[path]
    return old is new or bool(old == new)


def by_name(value: Any) -> Any:
    """A list of named mappings, such as stages, by their names: so each is compared with itself."""
    is_named = (
        isinstance(value, list)
        and value
        and all(isinstance(item, Mapping) and "name" in item for item in value)
    )
    if not is_named:
        return value
    names: list[str] = []
    for item in value:
        name, times = str(item["name"]), 1
        while name in ("order", *names):  # two may have one name: neither stands for the other
            times += 1
            name = f"{item['name']} {times}"
        names.append(name)
    return {"order": names, **{name: item for name, item in zip(names, value, strict=True)}}


def _may_change(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    parts = path.split(".")
    if any(covers(pattern.split("."), parts) for pattern in MAY_CHANGE):
        return True
    return parts[0] == "hooks" and len(parts) > 1 and _is_free(parts[1], before, now)


def covers(pattern: list[str], parts: list[str]) -> bool:
    """A path, cut at its dots, is the pattern or lies below it."""
    return len(parts) >= len(pattern) and all(
        p == part or (p == "*" and part not in _COMPONENTS)
        for p, part in zip(pattern, parts, strict=False)
    )


def _is_free(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Every hook that this key stood or stands for is free, or declares that it changes nothing.

    What the key is called says nothing: it may stand for a hook of another name.
    """
    names = set()
    for config in (before, now):
        options = config.get("hooks", {}).get(key)
        if options is not None:
            names.add(options.get("_target_") or options.get("name", key))
    return all(
        name in FREE_HOOKS
        or (
            name in registry.hooks
            and getattr(registry.hooks.get(name).target, "only_watches", False)
        )
        for name in names
    )


def _show(value: Any) -> str:
    return "absent" if value is _MISSING else repr(value)
