"""What processes say to one another, and what becomes of one that waits in vain."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import Hook, PhaseloopError
from phaseloop.engine.backends import Ddp
from phaseloop.engine.backends.primary import on_primary
from phaseloop.engine.console_handler import ConsoleHandler
from phaseloop.engine.errors import ConfigError, PeerError
from phaseloop.engine.task import Task
from phaseloop.hooks.crash import Crash
from tests.rigs import process, r1, ranks


def talk() -> dict[str, Any]:
    """Every collective once, with numbers that tell the ranks apart."""
    backend = ranks.ddp()
    backend.setup()
    backend.setup()  # again: nothing
    rank = backend.rank
    told = torch.tensor([10**rank])
    work = backend.sum_on_host(told)
    assert work is not None
    work.wait()
    try:
        on_primary(backend, lambda: int("no number"))
        problem = ""
    except (PeerError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    rows = torch.full((rank + 1, 2), float(rank), requires_grad=False)
    said = {
        "sum": told.tolist(),
        "all": backend.all_gather_object({"rank": rank}),
        "gathered": backend.gather_object(rank * 11),
        "broadcast": backend.broadcast_object(f"from {rank}"),
        "reduced": backend.all_reduce(torch.tensor([1.0, rank])).tolist(),
        "work": on_primary(backend, lambda: os.getpid()),
        "pid": os.getpid(),
        "problem": problem,
        "rows": rows.shape[0],
    }
    backend.barrier()
    backend.failed(RuntimeError("planted"))
    try:
        backend.barrier()
    except PhaseloopError as error:
        said["after a failure"] = str(error)
    return said


def test_every_collective_once() -> None:
    first, second = ranks.results(talk)
    for said in (first, second):
        assert said["sum"] == [11]
        assert said["all"] == [{"rank": 0}, {"rank": 1}]
        assert said["broadcast"] == "from 0"
        assert said["reduced"] == [2.0, 1.0]
        assert said["work"] == first["pid"] != second["pid"]
        assert "has failed" in said["after a failure"]
    assert first["gathered"] == [0, 11]
    assert second["gathered"] == [None, 11]
    assert first["problem"].startswith("ValueError")
    assert second["problem"].startswith("PeerError: rank 0: ValueError: invalid literal")


def beside_another_group() -> tuple[list[str], bool]:
    """What a backend says, asked twice, where torch.distributed is initialised already."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    said, backend = [], Ddp("cpu")
    for _ in range(2):
        try:
            backend.setup()
        except PhaseloopError as error:
            said.append(str(error))
    backend.teardown()
    return said, dist.is_initialized()


def test_who_could_not_join_is_not_taken_for_joined_and_leaves_nothing() -> None:
    said, is_there = ranks.agreed(ranks.results(beside_another_group))
    assert len(said) == 2 and all("initialized already" in one for one in said)
    assert is_there, "the group was somebody else's"


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    backend = Ddp()
    backend.setup()
    assert (backend.rank, backend.world_size, backend.primary) == (0, 1, True)
    assert backend.all_gather_object(3) == backend.gather_object(3) == [3]
    assert backend.sum_on_host(torch.ones(1)) is None
    model = torch.nn.Linear(2, 2)
    assert backend.wrap(model) is model
    backend.teardown()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"timeout": 0.0}, "backend.timeout"),
        ({"start_timeout": -1.0}, "backend.start_timeout"),
        ({"bucket_mb": 0.0}, "backend.bucket_mb"),
        ({"sync_batch_norm": True, "device": "cpu"}, "backend.sync_batch_norm"),
        ({"device": "tpu"}, "backend.device"),
        ({"device": "cpu:1"}, "backend.device"),
    ],
)
def test_what_is_wrong_with_options_is_said_by_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ddp(**options)
    assert caught.value.key == key


SHORT = 4.0
"""Seconds of a time limit, in which a process that does not sleep comes on a busy machine too."""


class Sleep(Hook):
    """On rank 1, sleeps at update 3."""

    def on_step(self, task: Task) -> None:
        if task.backend.rank == 1 and task.progress.updates == 3:
            time.sleep(600)


def train_with_one_asleep() -> tuple[int, float]:
    """Updates made, and seconds from the second one to the error."""
    task = r1.make_task(None, backend=ranks.ddp(timeout=SHORT))
    since = []

    class Note(Hook):
        def on_step(self, task: Task) -> None:
            since.append(time.monotonic())

    from phaseloop import Trainer

    hooks = {"learning_rate": r1.learning_rate.LearningRate(), "sleep": Sleep(), "note": Note()}
    try:
        Trainer(task, hooks).train()
    except Exception:
        return task.progress.updates, time.monotonic() - since[-1]
    raise AssertionError("nobody missed the one that slept")


def test_a_process_that_does_not_come_is_waited_for_as_long_as_the_time_limit() -> None:
    with ranks.started(train_with_one_asleep) as running:
        first = running[0].wait()
        running[1].kill()
    updates, seconds = first.value
    assert updates == 3
    assert SHORT <= seconds < 5 * SHORT  # the time limit, and not the 1,800 s of the beginning


class Astray(Hook):
    """On rank 1, an update more is counted than was made."""

    def on_step(self, task: Task) -> None:
        if task.backend.rank == 1 and task.progress.updates == 3:
            task.progress.updates += 1


def train_astray() -> str:
    from phaseloop import Trainer

    task = r1.make_task(None)
    hooks = {"learning_rate": r1.learning_rate.LearningRate(), "astray": Astray()}
    try:
        Trainer(task, hooks).train()
    except PhaseloopError as error:
        return str(error)
    return ""


def test_processes_that_come_apart_are_told_so_by_rank() -> None:
    for said in ranks.results(train_astray):
        assert "the processes have come apart" in said
        assert "rank 0: phase train, epoch 1, batch 3, updates 3" in said
        assert "rank 1: phase train, epoch 1, batch 3, updates 4" in said


def past_the_wrapper(task: Task) -> None:
    """A step that says that it goes through the model as a whole, and does not."""
    batch = task.next_batch()
    output = task.bare_model(batch.input)
    loss = task.criterion(output, batch.target)
    if task.train:
        task.backward(loss)
        task.update()


def train_past_the_wrapper(declared: bool) -> str:
    from phaseloop import Trainer

    past_the_wrapper.whole_model_forward = declared  # type: ignore[attr-defined]
    task = r1.make_task(None, train_step=past_the_wrapper)
    try:
        Trainer(task, {"learning_rate": r1.learning_rate.LearningRate()}).train()
    except PhaseloopError as error:
        return str(error)
    return repr([float(p.detach().sum()) for p in task.bare_model.parameters()])


def test_a_step_that_passes_the_wrapper_by_is_an_error_and_not_a_run_apart() -> None:
    for said in ranks.results(train_past_the_wrapper, declared=True):
        assert "whole_model_forward=True, and has not gone through the model" in said
    first, second = ranks.results(train_past_the_wrapper, declared=False)
    assert first == second


def train_by_the_clock(folder: Path) -> tuple[int, int, float]:
    """A run whose length, tests and saves go by time, where rank 1's clock is an hour ahead."""
    from phaseloop import Trainer

    if os.environ["RANK"] == "1":
        own, ticks = time.monotonic, iter(range(10**9))
        time.monotonic = lambda: own() + 3600 + 0.3 * next(ticks)  # and faster
    task = r1.make_task(
        folder,
        epochs=None,
        test=True,
        phases={"time": "1.5s", "test_every_time": "0.3s"},
    )
    hooks = r1.make_hooks(save={"every_minutes": 0.005})
    Trainer(task, hooks).train()
    return task.progress.updates, task.progress.tested_at, task.progress.seconds


def test_what_goes_by_time_goes_by_the_primarys_clock(tmp_path: Path) -> None:
    first, second = ranks.results(train_by_the_clock, tmp_path / "run")
    assert first == second
    updates, tested_at, seconds = first
    assert updates > 1
    assert 0 < tested_at <= updates
    assert 1.5 <= seconds < 30.0


class SlowStore(Hook):
    """On the primary, every checkpoint takes four seconds to get to the disk."""

    def on_start(self, task: Task) -> None:
        store = task.store
        assert store is not None
        write = store.write

        def slowly(*args: Any) -> Any:
            time.sleep(4.0)
            return write(*args)

        store.write = slowly  # type: ignore[method-assign]


def train_with_slow_disk(folder: Path, background: bool) -> int:
    from phaseloop import Trainer

    save = {"every_updates": 3, "background": background}
    task = r1.make_task(folder, backend=ranks.ddp(timeout=2.0), epochs=None, phases={"updates": 7})
    Trainer(task, r1.make_hooks(save=save, slow=SlowStore())).train()
    return task.progress.updates


@pytest.mark.parametrize("background", [True, False])
def test_a_save_may_take_longer_than_the_time_limit(tmp_path: Path, background: bool) -> None:
    assert ranks.results(train_with_slow_disk, tmp_path / "run", background) == [7, 7]


class GoesBack(Hook):
    """Rolls back at update 5, while checkpoint 4 is still on its way."""

    def on_gradients(self, task: Task) -> None:
        if task.progress.updates == 4 and not task.progress.roll_backs:
            task.roll_back("the test asked for it", most=1)


def train_and_go_back_with_slow_disk(folder: Path) -> tuple[int, int, str]:
    from phaseloop import Trainer

    task = r1.make_task(folder, backend=Ddp(timeout=2.0), epochs=None, phases={"updates": 6})
    hooks = r1.make_hooks(save={"every_updates": 4}, slow=SlowStore(), back=GoesBack())
    Trainer(task, hooks).train()
    return task.progress.roll_backs, task.progress.updates, Path(task.resumed_from).name


def test_going_back_waits_for_the_save_in_flight_on_all_processes(tmp_path: Path) -> None:
    told = ranks.results(train_and_go_back_with_slow_disk, tmp_path / "run")
    assert told == [(1, 6, "update_000000004-1")] * 2


def train_until_rank_1_raises(folder: Path) -> None:
    from phaseloop import Trainer

    hooks = r1.make_hooks(crash=Crash(weights=True), at=r1.At("on_gradients", 3, "raise", rank=1))
    Trainer(r1.make_task(folder), hooks).train()


def test_who_failed_writes_a_report_and_nobody_else(tmp_path: Path) -> None:
    ended = ranks.run(train_until_rank_1_raises, tmp_path / "run")
    assert all(one.code for one in ended)
    (report,) = (tmp_path / "run" / "crash").glob("*/report.json")
    said = json.loads(report.read_text())
    assert (said["rank"], said["error"], said["updates"]) == (1, "ToldError", 3)
    assert report.with_name("weights.pt").exists()
    # The primary knows only that it has lost another; what of, the launcher says.
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "another process has failed")


def wait_in_vain(rank: int) -> None:
    """One of two processes, of which the other is never started."""
    from phaseloop.engine.backends import processes

    started = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ranks.free_port()}  # fmt: skip
    os.environ.update({name: str(value) for name, value in started.items()})
    logging.getLogger("phaseloop").addHandler(ConsoleHandler())
    processes._LONG = {True: 0.2, False: 0.2}
    Ddp(start_timeout=1.5).setup()


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_long_for_others_says_so(rank: int) -> None:
    said = process.run(wait_in_vain, rank).output
    assert f"rank {rank} waits for all 2 processes that torchrun started, at 127.0.0.1:" in said
    assert "1.5 s at most (backend.start_timeout)" in said


def in_vain(where: str) -> str:
    """What is said on rank 0 where rank 1 sleeps, or goes into a collective of its own."""
    from phaseloop import Trainer
    from phaseloop.engine.backends import waiting

    if where == "alone":
        waiting._TO_TELL = 60.0  # however late the other gives up

    class Odd(Hook):
        def on_step(self, task: Task) -> None:
            if task.backend.rank == 1 and task.progress.updates == 4:
                if where == "asleep":
                    time.sleep(600)
                task.backend.all_gather_object("is anybody here?")

    task = r1.make_task(None, backend=ranks.ddp(timeout=SHORT))
    try:
        Trainer(task, {"learning_rate": r1.learning_rate.LearningRate(), "odd": Odd()}).train()
    except PhaseloopError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_who_did_not_come_is_named() -> None:
    with ranks.started(in_vain, "asleep") as running:
        first = running[0].wait()
        running[1].kill()
    assert "PeerError: rank 1 did not come within the time limit (backend.timeout" in first.value
    assert "rank 0 waited at" in first.value


def test_processes_that_wait_for_one_another_at_different_places_are_told_where() -> None:
    for said in ranks.results(in_vain, "alone"):
        assert "waited for one another at different places" in said
        assert "rank 1 at test_processes.py:" in said
        assert "in on_step" in said


def train_by_default() -> tuple[int, int]:
    from phaseloop import Trainer
    from phaseloop.engine.data.source import Data
    from phaseloop.engine.phases import Phases

    model = r1.network()
    task = Task(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=r1.optimizer("sgd", model),
        train=Data(r1.Samples(), 4),
        phases=Phases(epochs=1),
    )
    outcome = Trainer(task, {}).train()
    return outcome.updates, task.backend.world_size


def fail_while_another_is_busy() -> None:
    """Rank 1 fails with sums under way that rank 0 does not come to, and exits."""
    import torch.distributed as dist

    backend = ranks.ddp()
    backend.setup()
    backend.barrier()
    if backend.primary:
        time.sleep(BUSY)
        return
    under_way = backend.sum_on_host(torch.ones(1))
    assert under_way is not None and not under_way.is_completed()
    if not ranks.by_horovod():
        dist.all_reduce(torch.ones(1), async_op=True)
    backend.failed(RuntimeError("planted"))
    backend.teardown()
    Path(sys.argv[1]).touch()
    sys.exit(3)


BUSY = 40.0
"""Seconds; no test waits for them."""


def test_who_has_failed_is_gone_while_another_is_busy(tmp_path: Path) -> None:
    mark = tmp_path / "failed"
    code = "from tests.engine import test_processes as t; t.fail_while_another_is_busy()"
    with ranks.programs(code, str(mark)) as (first, second):
        while not mark.exists():
            assert second.poll() is None, second.communicate()[1]
            time.sleep(0.05)
        _, said = second.communicate(timeout=BUSY / 2)
        # Now and then its libraries do not let it go, and it is ended, with the code of an error.
        assert second.returncode in (3, 1), said
        assert first.poll() is None


def test_a_task_joins_by_itself_where_a_launcher_has_started_it() -> None:
    assert ranks.results(train_by_default) == [(10, 2), (10, 2)]
