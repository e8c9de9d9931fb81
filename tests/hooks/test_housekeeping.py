"""Hooks ``device_cache`` and ``garbage``: at which updates they act, and what they leave."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phaseloop import ConfigError
from phaseloop.hooks.device_cache import DeviceCache
from phaseloop.hooks.garbage import Garbage
from tests.rigs.probes import Break, SkipAt, watch
from tests.rigs.r0 import r0, train


class CUDA:
    """Stands for a GPU where there is none."""

    type = "cuda"


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cleared"))
    return calls


def test_the_cache_is_cleared_at_every_nth_update(
    cleared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = r0(range(7), 2, data={"micro_batch_size": 1})
    hook = DeviceCache(2)
    start = DeviceCache.on_start

    def on_start(self: DeviceCache, task: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(task), "device", CUDA())
            start(self, task)

    monkeypatch.setattr(DeviceCache, "on_start", on_start)
    at = watch("on_step", lambda task: (task.progress.updates, len(cleared)))
    train(task, cache=hook, at=at)
    assert sorted(dict(at.seen).items()) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]


def test_on_the_cpu_it_does_nothing_and_says_so(
    cleared: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    train(r0(range(4), 1), cache=DeviceCache(1))
    assert cleared == []
    assert caplog.text.count("hooks.cache: nothing is cached on cpu") == 1


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    calls: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: calls.append(1))
    yield calls
    gc.enable()


def test_garbage_is_collected_at_every_nth_update(collections: list[int]) -> None:
    at = watch("on_step", lambda task: (len(collections), gc.isenabled()))
    train(r0(range(5), 1), garbage=Garbage(2), skip=SkipAt(3), at=at)
    # At the start, and after updates 2 and 4; the skipped window, the third, collects nothing.
    assert at.seen == [(1, False), (2, False), (2, False), (2, False), (3, False)]
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_error(collections: list[int]) -> None:
    def fail(_: Any) -> None:
        assert not gc.isenabled()
        raise Break

    for event in ("on_start", "on_forward"):
        with pytest.raises(Break):
            train(r0([1], 1), garbage=Garbage(2), fails=watch(event, fail))
        assert gc.isenabled()


def test_who_had_switched_it_off_finds_it_so(collections: list[int]) -> None:
    gc.disable()
    train(r0([1], 1), garbage=Garbage(2))
    assert not gc.isenabled()


@pytest.mark.parametrize("kind", [DeviceCache, Garbage])
def test_a_cadence_of_zero_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"every_updates: 0 is less than 1"):
        kind(0)
