"""The order of an epoch: a permutation, the same for ever, another one each epoch."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phaseloop.engine.data.order import (
    RANDPERM_LIMIT,
    KeyedPermutation,
    Permutation,
    Sequential,
    chosen,
    epoch_order,
)

KINDS = {
    "sequential": lambda samples, seed: Sequential(samples),
    "stored": Permutation,
    "keyed": KeyedPermutation,
}
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 1023, 1025, 4097]
HUGE = 2**24 + 5

# Recorded with torch 2.13; see the last two tests.
PINNED_12 = [11, 10, 7, 0, 1, 2, 4, 3, 9, 5, 8, 6]
PINNED_1000 = "e8fabf4d64cb983f"
ORDER = int.from_bytes(hashlib.sha256(b"order").digest()[:8], "big")
PINNED_HUGE = "4ae223c6b67e82e4"


# --- an independent, slow form of the Feistel permutation ---


def mixed(state: int, *parts: int) -> int:
    """SplitMix64's finaliser over a chain of parts, in arbitrary precision."""
    for part in parts:
        z = ((state ^ (part % 2**64)) + 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z // 2**27)) * 0x94D049BB133111EB) % 2**64
        state = z ^ (z // 2**31)
    return state


def keyed(position: int, samples: int, seed: int) -> int:
    """The image of one position under four Feistel rounds with cycle walking."""
    bits = 1
    while 4**bits < samples:
        bits += 1
    keys = [mixed(seed, turn) for turn in range(4)]
    value = position
    while True:
        left, right = divmod(value, 2**bits)
        for key in keys:
            z = right ^ key
            z = ((z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9) % 2**64
            z = ((z ^ (z // 2**27)) * 0x94D049BB133111EB) % 2**64
            z = z ^ (z // 2**31)
            left, right = right, left ^ (z % 2**bits)
        value = left * 2**bits + right
        if value < samples:
            return value


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("samples", SIZES)
def test_every_sample_comes_once(kind: str, samples: int) -> None:
    order = KINDS[kind](samples, 11).slice(0, samples)
    assert order.dtype == torch.int64
    assert order.shape == (samples,)
    assert torch.equal(order.sort().values, torch.arange(samples))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_the_keyed_one_is_one_to_one_for_any_size_and_key(samples: int, seed: int) -> None:
    order = KeyedPermutation(samples, seed).slice(0, samples)
    assert torch.equal(order.sort().values, torch.arange(samples))


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 300), st.data())
def test_a_slice_agrees_with_the_whole(kind: str, samples: int, data: Any) -> None:
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    order = KINDS[kind](samples, 5)
    assert torch.equal(order.slice(start, stop), order.slice(0, samples)[start:stop])


def test_a_limit_costs_eight_bytes_for_each_sample_that_is_left() -> None:
    chosen(HUGE, 10, 0)
    tracemalloc.start()
    left = chosen(HUGE, 3 * 2**20, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert left is not None and len(left) == 3 * 2**20
    # Torch's memory is not traced: what is seen is NumPy's, which works in pieces.
    assert peak < 10 * 8 * 2**20
    kept = KeyedPermutation(HUGE, 0).slice(0, 3 * 2**20)
    assert torch.equal(left, kept.sort().values)


def test_beyond_the_limit_windows_hold_distinct_samples_in_range() -> None:
    order = KeyedPermutation(HUGE, 3)
    step = 100
    windows = [*range(0, HUGE - step, HUGE // 50), HUGE - step]
    seen = torch.cat([order.slice(start, start + step) for start in windows])
    assert seen.min() >= 0
    assert seen.max() < HUGE
    assert len(seen.unique()) == len(seen)  # the windows do not overlap, so no sample repeats


@pytest.mark.parametrize("samples", [1, 2, 3, 6, 1000, HUGE, 10**9, 2**40 + 1])
def test_the_keyed_one_equals_its_slow_form(samples: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        order = KeyedPermutation(samples, seed)
        for start in {0, samples // 2, max(0, samples - 20)}:
            stop = min(samples, start + 20)
            slow = [keyed(position, samples, seed) for position in range(start, stop)]
            assert order.slice(start, stop).tolist() == slow


def test_the_limit_decides_between_the_two() -> None:
    def kind(samples: int) -> type:
        return type(epoch_order(samples, shuffle=True, seed=0, epoch=1))

    assert RANDPERM_LIMIT == 2**24
    assert kind(1000) is Permutation
    assert kind(HUGE) is KeyedPermutation
    assert isinstance(epoch_order(HUGE, shuffle=False, seed=0, epoch=1), Sequential)


def test_without_shuffling_the_order_is_the_data_set_s_own() -> None:
    for epoch in (1, 2):
        order = epoch_order(10, shuffle=False, seed=0, epoch=epoch)
        assert order.slice(3, 7).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("samples", [1000, HUGE])
def test_seed_epoch_and_roll_backs_each_give_another_order(samples: int) -> None:
    def head(**changes: int) -> tuple[int, ...]:
        options = {"seed": 0, "epoch": 1, "roll_backs": 0, **changes}
        return tuple(epoch_order(samples, shuffle=True, **options).slice(0, 50).tolist())

    variants = [{}, {"seed": 1}, {"epoch": 2}, {"roll_backs": 1}, {"epoch": 2, "roll_backs": 1}]
    heads = [head(**changes) for changes in variants]
    assert len(set(heads)) == len(heads)
    assert heads == [head(**changes) for changes in variants]


def test_the_order_is_a_function_of_nothing_else() -> None:
    first = epoch_order(100, shuffle=True, seed=3, epoch=2).slice(0, 100)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(epoch_order(100, shuffle=True, seed=3, epoch=2).slice(0, 100), first)
    assert torch.equal(torch.get_rng_state(), state)  # and it draws from no shared generator


# The order must never change: a run that is resumed by a later version goes on in it. Where these
# fail, the code is at fault or, for the stored one, torch.randperm has changed.


def test_pinned_the_stored_order() -> None:
    # torch.randperm of a CPU generator seeded with mix(seed, ORDER, epoch, roll_backs). Literal
    # values: how randperm draws is torch's own affair, and torch does not promise to keep it.
    key = mixed(0, ORDER, 1, 0)
    order = epoch_order(12, shuffle=True, seed=0, epoch=1).slice(0, 12)
    assert order.tolist() == PINNED_12
    generator = torch.Generator().manual_seed(key)
    assert order.tolist() == torch.randperm(12, generator=generator).tolist()
    thousand = epoch_order(1000, shuffle=True, seed=42, epoch=3, roll_backs=1).slice(0, 1000)
    assert _digest(thousand.tolist()) == PINNED_1000


def test_pinned_the_keyed_order() -> None:
    order = epoch_order(HUGE, shuffle=True, seed=42, epoch=3, roll_backs=1)
    key = mixed(42, ORDER, 3, 1)
    slow = [keyed(position, HUGE, key) for position in range(1000)]
    assert order.slice(0, 1000).tolist() == slow
    assert _digest(slow) == PINNED_HUGE


def _digest(order: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, order)).encode()).hexdigest()[:16]
