"""Random numbers: seeds by hashing, and the three global generators put aside and back.

Every seed in a run comes from :func:`mix` over (seed, purpose, ...), so that no draw depends on
how many draws came before it.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# What a stream of random numbers is for: the second part of every key, so that no two purposes
# ever share a stream. Far apart, since seed and purpose are joined by an exclusive or: small ones
# would give seed 0 the stream that seed 3 has for another purpose. The first 64 bits of the
# SHA-256 of the name in small letters. Never change one: the order of old runs depends on it.
ORDER = 0x3EEB7E96E59CE40F
SAMPLE_TRAIN = 0x76D4E8DB74445812
SAMPLE_TEST = 0x0DAF281F914073DC
LOADER = 0xD47712CCEB4C7806
START = 0xCCED28C6DC3F99C2
MIX_CHOICE = 0xEDD1EEB09EBF9312
MIX_ORDER = 0xB5B22F6EDA2F72BD
SAMPLER = 0xB7A56C61657D4E5C
LIMIT = 0x55EA09E5715D0A8D
REBUILD = 0xCF44886E54F424CE
AUGMENT = 0x5D69825FE9A39338

_MASK = (1 << 64) - 1

alone = threading.RLock()
"""Held while the global generators are set to something for a while, and put back: where ranks are
threads of one process, all of them share these."""


def _renew() -> None:
    """In a worker: whoever held the lock when it was forked is not there to let go of it."""
    global alone
    alone = threading.RLock()


os.register_at_fork(after_in_child=_renew)


def mix(state: int, *parts: int) -> int:
    """Hash of integers to 64 bits: one round of SplitMix64's finaliser per part.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        state: where to start; the result of an earlier call continues that one:
            ``mix(mix(s, a), b) == mix(s, a, b)``.
        parts: integers; negative ones count modulo 2**64.
    """
    for part in parts:
        z = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        state = z ^ (z >> 31)
    return state


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global CPU generators, in about 10 µs.

    ``torch.manual_seed`` would also seed every device and costs forty times as much; device
    generators belong to the backend.
    """
    with alone:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)


class HostGenerators:
    """The states of the three global CPU generators, taken when the object is made."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        with alone:
            self._python = random.getstate()
            self._numpy = np.random.get_state()
            self._torch = torch.default_generator.get_state()

    def put_back(self) -> None:
        """Set the generators to the states that this object holds."""
        with alone:
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            torch.default_generator.set_state(self._torch)


@contextmanager
def aside(seed: int) -> Iterator[None]:
    """The three generators seeded afresh within, and as they were behind it."""
    with alone:
        states = HostGenerators()
        try:
            seed_host(seed)
            yield
        finally:
            states.put_back()


def host_state() -> dict[str, Any]:
    """States of the three generators as tensors and plain Python, for a checkpoint."""
    with alone:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    return _plain(*states)


def host_state_of(seed: int) -> dict[str, Any]:
    """The same as they would be after :func:`seed_host`; none is touched."""
    return _plain(
        random.Random(seed).getstate(),
        np.random.RandomState(seed & 0xFFFFFFFF).get_state(),
        torch.Generator().manual_seed(seed).get_state(),
    )


def _plain(python: Any, numpy: Any, of_torch: torch.Tensor) -> dict[str, Any]:
    version, numbers, gauss = python
    kind, keys, position, has_gauss, cached = numpy
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": of_torch,
    }


def set_host_state(state: dict[str, Any]) -> None:
    """The reverse of :func:`host_state`."""
    version, numbers, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    with alone:
        random.setstate((version, tuple(numbers.tolist()), gauss))
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.default_generator.set_state(state["torch"])
