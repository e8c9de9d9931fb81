"""phaseloop: an event-driven training engine for PyTorch.

Names are loaded when they are first used, so that checking a configuration does not have to wait
for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from phaseloop.engine import *  # noqa: F403
    from phaseloop.hooks import default_hooks as default_hooks

_ENGINE = "phaseloop.engine"
_WIRED = ("Task", "Trainer", "default_hooks")


def __getattr__(name: str) -> Any:
    if name in _WIRED:
        # The engine knows no step and no hook; whoever trains through this face wants ours.
        importlib.import_module("phaseloop.train_steps")
        importlib.import_module("phaseloop.hooks")
    if name == "__all__":  # what `from phaseloop import *` asks for
        return [*importlib.import_module(_ENGINE).__all__, "default_hooks"]
    if name == "default_hooks":
        return importlib.import_module("phaseloop.hooks").default_hooks
    engine = importlib.import_module(_ENGINE)
    if name in engine.__all__:
        return getattr(engine, name)
    raise AttributeError(f"module 'phaseloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module(_ENGINE).__all__, "default_hooks"]
