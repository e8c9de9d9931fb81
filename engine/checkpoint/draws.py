"""Draws of the packages behind fsspec: kept apart from those of the training."""

from __future__ import annotations

import functools
import random
import sys
import types
from typing import Any

_PACKAGES = ("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google",
             "ossfs", "paramiko", "s3fs")  # fmt: skip


def let_draw_apart() -> None:
    """Give the packages behind fsspec a generator of their own.

    They wait for random times between tries, and draw them from Python's global generator: that
    of the training, whose draws would then depend on the network.
    """
    apart = _apart()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in _PACKAGES or vars(module).get("random") is not random:
            continue
        module.random = apart  # type: ignore[attr-defined]
        for thing in list(vars(module).values()):
            init = vars(thing).get("__init__") if isinstance(thing, type) else None
            defaults = getattr(init, "__defaults__", None) or ()
            if init is not None and random.random in defaults:
                init.__defaults__ = tuple(
                    apart.random if value == random.random else value for value in defaults
                )


@functools.cache
def _apart() -> Any:
    """Python's module ``random`` with another generator."""
    module, own = types.ModuleType("random"), random.Random()
    vars(module).update(vars(random))
    for name in random.__all__:
        if callable(getattr(own, name, None)):
            setattr(module, name, getattr(own, name))
    return module
