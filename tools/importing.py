"""Importing: without the garbage collector, which takes a fifth of that time and finds nothing.

What was imported stays, so the collector need not go through it again either.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While torch is imported, with dynamo; where they are there already, nothing is changed."""
    if "torch._dynamo" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
