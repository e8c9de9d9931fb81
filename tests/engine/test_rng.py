"""Random numbers: the hash behind every seed, and the three generators put aside and back."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phaseloop.engine import rng
from tests.engine.test_order import mixed

U64 = st.integers(0, 2**64 - 1)


def draws() -> list[float]:
    """Two draws from each generator, the second kept back by Gaussian ones for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        *torch.randn(3).tolist(),
    ]


# --- mix ---


def test_mix_is_one_round_of_splitmix64_per_part() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as its authors' C code gives them:
    # output i is the finaliser of seed + i * 0x9e3779b97f4a7c15, and mix adds that constant once.
    gamma = 0x9E3779B97F4A7C15
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + i * gamma) % 2**64 for i in range(3)]
    assert [rng.mix(state, 0) for state in states] == expected


def test_pinned() -> None:
    """Never to change: the data of every old run depends on it. ``mixed`` is a second form."""
    for parts in [(0,), (1, 2, 3), (-1,), (2**64 - 1,), (0, 0), (7, -3, 5)]:
        assert rng.mix(42, *parts) == mixed(42, *parts)
    assert rng.mix(42) == 42


@given(U64, U64, U64)
def test_mix_may_be_done_in_steps(state: int, first: int, second: int) -> None:
    assert rng.mix(rng.mix(state, first), second) == rng.mix(state, first, second)


@given(U64, st.integers(-(2**63), 2**64 - 1))
def test_mix_stays_in_64_bits_and_takes_negative_parts(state: int, part: int) -> None:
    assert 0 <= rng.mix(state, part) < 2**64
    assert rng.mix(state, part) == rng.mix(state, part % 2**64)


@pytest.mark.parametrize(
    ("seeds", "purposes"), [(range(1), range(1, 7)), (range(6), range(1, 2))], ids=["run", "seeds"]
)
def test_near_keys_are_far_apart(seeds: range, purposes: range) -> None:
    """All streams of one run, and one purpose's streams of runs with near seeds."""
    found = {
        rng.mix(seed, purpose, epoch, position)
        for seed in seeds
        for purpose in purposes
        for epoch in range(10)
        for position in range(50)
    }
    assert len(found) == 6 * 10 * 50
    low = {seed & 0xFFFFFFFF for seed in found}  # what NumPy is seeded with
    assert len(low) > 0.999 * len(found)
    assert rng.mix(0, 1, 2) != rng.mix(0, 2, 1)
    assert rng.mix(0, 1) != rng.mix(0, 1, 0)


def test_purposes_are_fixed_and_distinct() -> None:
    for name in ("order", "sample_train", "sample_test", "loader", "start"):
        digest = hashlib.sha256(name.encode()).digest()
        assert getattr(rng, name.upper()) == int.from_bytes(digest[:8], "big")


def test_no_two_small_seeds_share_a_stream_across_purposes() -> None:
    purposes = (rng.ORDER, rng.SAMPLE_TRAIN, rng.SAMPLE_TEST, rng.LOADER, rng.START)
    streams = {rng.mix(seed, purpose) for seed in range(100) for purpose in purposes}
    assert len(streams) == 100 * len(purposes)


# --- the generators ---


@given(U64)
def test_a_seed_fixes_all_three(seed: int) -> None:
    rng.seed_host(seed)
    first = draws()
    draws()
    rng.seed_host(seed)
    assert draws() == first


def test_seeding_is_what_the_libraries_do_by_themselves() -> None:
    seed = 2**40 + 5
    rng.seed_host(seed)
    found = draws()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    assert draws() == found


@pytest.mark.parametrize("before", range(4))
def test_put_aside_and_back(before: int) -> None:
    """Also where a Gaussian draw has kept its second value back."""
    rng.seed_host(1)
    for _ in range(before):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    kept = rng.HostGenerators()
    expected = draws()
    rng.seed_host(99)
    draws()
    kept.put_back()
    assert draws() == expected
    kept.put_back()
    assert draws() == expected


@pytest.mark.parametrize("before", range(4))
def test_states_survive_a_file(before: int, tmp_path: Any) -> None:
    rng.seed_host(1)
    for _ in range(before):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    torch.save(rng.host_state(), tmp_path / "state.pt")
    expected = draws()
    rng.seed_host(99)
    draws()
    rng.set_host_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected


def test_a_state_is_of_its_moment() -> None:
    rng.seed_host(1)
    state = rng.host_state()
    expected = draws()
    draws()
    rng.set_host_state(state)
    assert draws() == expected
    rng.set_host_state(state)
    assert draws() == expected


def test_taking_a_state_draws_nothing() -> None:
    rng.seed_host(1)
    expected = draws()
    rng.seed_host(1)
    rng.host_state()
    rng.HostGenerators()
    assert draws() == expected
