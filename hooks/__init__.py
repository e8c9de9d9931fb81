"""Hooks: one a file, registered by name. A hook talks to the task, never to another hook."""

if not __name__.startswith("phaseloop."):
    raise ImportError("import phaseloop.hooks, not hooks: a second copy has registries of its own")

from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.events import Hook
from phaseloop.engine.trainer import registered_defaults
from phaseloop.hooks import (
    activations,
    average,
    barrier,
    checkpoint,
    console,
    crash,
    csv,
    curves,
    device_cache,
    device_stats,
    early_stop,
    fit_memory,
    freeze,
    garbage,
    gradient_norm,
    histograms,
    images,
    learning_rate,
    meter_sync,
    metrics_file,
    model_summary,
    non_finite,
    precise_bn,
    profiler,
    progress,
    row_sync,
    sample_images,
    teacher,
    tensorboard,
    timing,
    watchdog,
)


def default_hooks(**changes: Hook | None) -> dict[str, Hook]:
    """The hooks that are on by default, by instance name.

    Args:
        changes: instance name to a hook that is added or takes the place of the default of that
            name, or to None, which leaves it out.

    Raises:
        ConfigError: a name to leave out is not among the defaults.
    """
    hooks: dict[str, Hook | None] = {**registered_defaults()}
    for name, hook in changes.items():
        if hook is None and name not in hooks:
            raise ConfigError(
                f"hooks.{name}",
                f"there is none to leave out.{nearest(name, hooks)} "
                f"On by default: {listing(hooks)}",
            )
    hooks.update(changes)
    return {name: hook for name, hook in hooks.items() if hook is not None}


__all__ = [
    "activations",
    "average",
    "barrier",
    "checkpoint",
    "console",
    "crash",
    "csv",
    "curves",
    "default_hooks",
    "device_cache",
    "device_stats",
    "early_stop",
    "fit_memory",
    "freeze",
    "garbage",
    "gradient_norm",
    "histograms",
    "images",
    "learning_rate",
    "meter_sync",
    "metrics_file",
    "model_summary",
    "non_finite",
    "precise_bn",
    "profiler",
    "progress",
    "sample_images",
    "teacher",
    "tensorboard",
    "timing",
    "watchdog",
]
