"""Joining Horovod, a second time too, and leaving it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from phaseloop.engine.backends import Horovod, rendezvous
from phaseloop.engine.errors import ConfigError
from tests.rigs import ranks

BUSY = 1.0
"""Seconds that one process has still something to do."""


def leave() -> float:
    """Seconds until this process has left; rank 0 comes later."""
    backend = ranks.ddp()
    backend.setup()
    backend.barrier()
    began = time.monotonic()
    if backend.primary:
        time.sleep(BUSY)
    backend.teardown()
    assert backend.host.alone
    return time.monotonic() - began


def test_no_process_leaves_before_all_are_ready() -> None:
    _, second = ranks.results(leave)
    assert second > BUSY * 0.9


def twice() -> list[str]:
    """What a backend says that cannot join, asked twice."""
    first = ranks.ddp()
    first.setup()
    first.teardown()
    said, backend = [], ranks.ddp(fusion_mb=3.0)
    for _ in range(2):
        try:
            backend.setup()
        except ConfigError as error:
            said.append(error.key)
    backend.teardown()  # nothing was joined: nobody is waited for
    return said


def test_who_could_not_join_is_not_taken_for_joined() -> None:
    assert ranks.agreed(ranks.results(twice)) == ["backend.fusion_mb"] * 2


# --- a second training in the process ---


def second(first: dict[str, Any], then: dict[str, Any]) -> tuple[str, list[str]]:
    """What the second backend of a process says, as an error and in the log, and what it leaves."""
    logged: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("phaseloop").addHandler(Heard())
    backend = ranks.ddp(**first)
    backend.setup()
    backend.teardown()
    backend, said = ranks.ddp(**then), ""
    try:
        backend.setup()
    except ConfigError as error:
        said = str(error)
    backend.teardown()
    assert "HOROVOD_FUSION_THRESHOLD" not in os.environ, "it would be taken for the user's"
    return said, logged


def test_three_processes_never_get_anothers_fusion_in_silence() -> None:
    said, _ = ranks.agreed(ranks.results(second, {"fusion_mb": 8.0}, {}, processes=3))
    assert said.startswith("backend.fusion_mb: Horovod was initialized in this process")
    assert f"{8 * 2**20} bytes" in said and "0 bytes" in said


@pytest.mark.parametrize(("timeout", "is_said"), [(40.0, False), (41.0, True)])
def test_a_longer_time_limit_comes_too_late_for_horovod_and_that_is_said(
    timeout: float, is_said: bool
) -> None:
    said, logged = ranks.agreed(ranks.results(second, {"timeout": 40.0}, {"timeout": timeout}))
    assert not said
    assert any("with a time limit of 40 s" in line for line in logged) is is_said


# --- what is left of it ---


def listening() -> set[int]:
    connections = psutil.Process().net_connections()
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def test_no_server_is_left_listening() -> None:
    before = listening()
    with rendezvous.server(2) as start:
        first = int(start()[rendezvous.PORT])
        again = int(start()[rendezvous.PORT])
        assert listening() - before == {again}, "the one before is gone"
        assert first != again
    assert listening() == before


def wait_for_a_stopped_one() -> None:
    """Rank 1 stops; rank 0 waits for it in vain, and exits as any program does."""
    backend = Horovod("cpu", timeout=1.0)
    backend.setup()
    backend.patient(False)
    backend.barrier()
    if not backend.primary:
        os.kill(os.getpid(), signal.SIGSTOP)
    Path(f"{sys.argv[1]}.stopped").touch()
    try:
        backend.barrier()
    except RuntimeError:
        backend.failed(RuntimeError("planted"))
        backend.teardown()
        raise


def test_who_has_failed_does_not_wait_at_its_exit_for_one_that_is_stopped(tmp_path: Path) -> None:
    code = "from tests.horovod import test_joining; test_joining.wait_for_a_stopped_one()"
    mark = tmp_path / "rank0"
    with ranks.programs(code, str(mark)) as (first, _):
        while not mark.with_name("rank0.stopped").exists():
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)
        began = time.monotonic()
        _, said = first.communicate(timeout=25)  # Horovod itself waits for 30 s
    assert first.returncode == 1 and "RuntimeError" in said
    assert time.monotonic() - began < 20
