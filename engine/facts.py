"""Facts: a value as plain Python that is the same in every process, to be compared on a resume."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor

_SHOWN = 16  # entries; of a longer list of values a checksum says enough


def fact_of(value: Any) -> Any:
    """Numbers, texts, lists and mappings as they are; a tuple as a list, a set in order.

    Arrays, tensors and long lists become a checksum, functions and classes their name, and any
    other object the name of its class: what has an address has another one next time.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # without types of their own, such as NumPy's
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = value.detach().cpu() if isinstance(value, Tensor) else value
        return array.item() if array.ndim == 0 else _checksum(array.tolist())
    if isinstance(value, Mapping):
        return {str(key): fact_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, Set)):
        facts = [fact_of(item) for item in value]
        facts = sorted(facts, key=repr) if isinstance(value, Set) else facts
        return facts if len(facts) <= _SHOWN else _checksum(facts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: fact_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return name_of(value)


def name_of(function: Any) -> str | None:
    """The name of a function, or of the class of an object that is called as one."""
    if function is None:
        return None
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__qualname__", type(function).__name__))


def fingerprint(dataset: Any) -> str | None:
    """What a dataset says its content is, as its attribute ``fingerprint``; None: nothing."""
    found = getattr(dataset, "fingerprint", None)
    return found if isinstance(found, str) else None


def _checksum(values: list[Any]) -> str:
    facts = [fact_of(v) if isinstance(v, (list, tuple)) else v for v in values]
    return f"{len(values)} values, checksum {zlib.crc32(repr(facts).encode()):08x}"
