"""Room for the connections of many processes."""

from __future__ import annotations

import resource

import pytest

from phaseloop.engine.backends import sockets


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits in force, the last one at the end; at first a machine's usual ones."""
    set_: list[tuple[int, int]] = [(1024, 4096)]
    monkeypatch.setattr(sockets.resource, "getrlimit", lambda _: set_[-1])
    monkeypatch.setattr(sockets.resource, "setrlimit", lambda _, pair: set_.append(pair))
    return set_


def test_few_processes_change_nothing(limits: list[tuple[int, int]]) -> None:
    sockets.make_room(2)
    sockets.make_room(255)  # 511 of 1,024
    assert limits == [(1024, 4096)]


def test_a_thousand_processes_have_two_thousand_connections(
    limits: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    sockets.make_room(1000)
    assert limits[-1] == (3024, 4096)
    sockets.make_room(1000)
    assert len(limits) == 2
    assert caplog.text == ""


def test_a_machine_that_does_not_allow_it_is_told(
    limits: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    sockets.make_room(3000)
    assert limits[-1] == (4096, 4096)
    assert "3000 processes have 6001 connections each" in caplog.text
    assert "allows 4096 open files" in caplog.text


def test_no_limit_at_all(limits: list[tuple[int, int]]) -> None:
    limits[0] = (1024, resource.RLIM_INFINITY)
    sockets.make_room(3000)
    assert limits[-1] == (7024, resource.RLIM_INFINITY)
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sockets.make_room(10**6)
    assert len(limits) == 3
