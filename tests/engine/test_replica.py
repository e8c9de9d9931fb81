"""Ranks that are threads of one process: what is theirs, and what they share."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import Run
from phaseloop.engine import outcomes, replica, rng
from phaseloop.engine import signals as signals_module
from phaseloop.engine.backends import joining
from phaseloop.engine.environment import Environment
from phaseloop.engine.replica import Replica
from phaseloop.engine.signals import Receiver, Signals
from tests.rigs import process


def in_replicas(function: Callable[[int], Any]) -> list[Any]:
    """What a function of the rank gives in two threads that are ranks, by rank."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        replica.enter(Replica(rank, 2, rank, 2))
        found[rank] = function(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[rank] for rank in range(2)]


def test_a_thread_and_those_that_it_starts_are_of_one_rank() -> None:
    def ranks(_: int) -> list[int]:
        seen: list[int] = []

        def note() -> None:
            joined = joining.found()
            assert joined is not None and joined.by == joining.XLA
            seen.append(joined.rank)

        note()
        timer = threading.Timer(0.0, note)
        timer.start()
        timer.join()
        return seen

    assert in_replicas(ranks) == [[0, 0], [1, 1]]
    assert replica.mine() is None


def test_each_log_has_what_its_replica_says() -> None:
    log, both = logging.getLogger("phaseloop.test"), threading.Barrier(2)

    class Kept(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    def say(rank: int) -> list[str]:
        handler = Kept()
        log.addHandler(replica.keep_to_mine(handler))
        both.wait(10)
        log.warning("from %d", rank)
        both.wait(10)
        log.removeHandler(handler)
        return handler.lines

    assert in_replicas(say) == [["from 0"], ["from 1"]]


def test_what_one_failed_of_is_left_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("PHASELOOP_STARTED_BY", "phaseloop")
    in_replicas(lambda rank: outcomes.say(ValueError(f"of {rank}"), 1, f"text {rank}"))
    left = outcomes.by_replica(2)
    assert [(one.who, one.head) for one in left if one is not None] == [
        ("rank 0", "ValueError: of 0"),
        ("rank 1", "ValueError: of 1"),
    ]
    assert outcomes.in_words(7, left[1]).startswith("rank 1: ")  # type: ignore[arg-type]
    assert "phaseloop" in json.loads((tmp_path / "error.json.1").read_text())


def test_settings_are_put_back_when_the_last_run_ends() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    first, second = Environment(Run(deterministic=True)), Environment(Run(deterministic=True))
    first.apply()
    second.apply()
    first.put_back()
    assert torch.are_deterministic_algorithms_enabled()
    second.put_back()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_draws_of_one_do_not_mix_with_those_of_another() -> None:
    def draws(rank: int) -> list[float]:
        found: list[float] = []
        for _ in range(50):
            with rng.aside(rank):
                for _ in range(3):
                    found.append(random.random())
                    time.sleep(0)  # another thread may run
        return found

    for rank, found in enumerate(in_replicas(draws)):
        own = random.Random(rank)
        assert found == [own.random() for _ in range(3)] * 50


def test_host_states_can_be_known_without_being_taken() -> None:
    with rng.aside(11):
        taken = rng.host_state()
    known = rng.host_state_of(11)
    assert known["python"][0] == taken["python"][0]
    assert torch.equal(known["python"][1], taken["python"][1])
    assert torch.equal(known["numpy"][1], taken["numpy"][1])
    assert torch.equal(known["torch"], taken["torch"])


# --- signals, in a process of their own ---


def received(numbers: list[int]) -> list[Any]:
    """What two runs in threads have of signals to the process: and how each thread ends."""
    signals_module._AT_ONCE = 30.0  # whatever else the machine does
    aborted = threading.Event()
    Receiver(aborted.set).install()
    ready, over = threading.Barrier(3), threading.Event()

    def run(rank: int) -> Any:
        signals = Signals(grace=60.0)
        signals.install()
        try:
            ready.wait(10)
            while not over.is_set():
                time.sleep(0.01)
            return signals.received
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            signals.restore()

    found: list[Any] = []
    trains = threading.Thread(target=lambda: found.extend(in_replicas(run)))
    trains.start()
    ready.wait(10)
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    if not aborted.is_set():
        over.set()
    trains.join(10)
    return [*found, aborted.is_set()]


def test_a_signal_comes_to_the_runs_of_all_threads() -> None:
    term = signal.SIGTERM
    assert process.result(received, [term]) == [term, term, False]


def test_a_second_ctrl_c_ends_all_of_them_at_once() -> None:
    twice = [signal.SIGINT, signal.SIGINT]
    assert process.result(received, twice) == ["interrupted", "interrupted", True]


def test_a_signal_before_any_run_ends_the_process() -> None:
    assert process.run(too_early).code == 128 + signal.SIGTERM


def too_early() -> None:
    Receiver(lambda: None).install()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
