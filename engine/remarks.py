"""Remarks: what an error of torch or of the user's code does not say, put beneath it.

The error stays the one that it is, for whoever catches it by its type.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

OUT_OF_MEMORY = (
    "phaseloop: a smaller data.train.micro_batch_size (or data.test.micro_batch_size) takes less "
    "memory, and the update stays the same; 'hooks.fit_memory={}' finds one by itself"
)


def remark(error: BaseException, text: str) -> None:
    """Have ``text`` printed under the error's traceback."""
    notes = [*getattr(error, "__notes__", ()), text]
    error.__notes__ = notes  # type: ignore[attr-defined, unused-ignore]


def remarks(error: BaseException) -> str:
    """What a traceback lacks of them: Python prints them itself from 3.11 on.

    One about memory is added here, by the error's name: this is asked before torch is imported.
    """
    known = () if sys.version_info >= (3, 11) else getattr(error, "__notes__", ())
    memory = (OUT_OF_MEMORY,) if type(error).__name__ == "OutOfMemoryError" else ()
    return "".join(f"\n{text}" for text in (*known, *memory))


def looks(value: Any) -> str:
    """A tensor's dtype and shape, ``float32 [64, 10]``; of other things the tensors in them.

    Raises nothing, since the error that is being told of must not be lost: what cannot say its
    shape, as nested tensors cannot, is named by its type.
    """
    try:
        return _looks(value)
    except Exception:
        return type(value).__name__


def _looks(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {looks(part)}" for key, part in value.items())
        return f"{{{inside}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(looks(part) for part in value)})"
    return type(value).__name__
