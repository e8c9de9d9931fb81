"""DDP-a, DATA, MET-b and RES with streams on several processes, each of which reads its share."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from phaseloop import Data, Hook, Trainer
from phaseloop.engine.backends import Fsdp
from phaseloop.engine.backends.processes import Processes
from tests.rigs import equal, pairs, process, r0, r1, ranks, streams
from tests.rigs.probes import watch

BATCH = 8
"""Of two processes, four each."""


def backend() -> Processes:
    return ranks.ddp(timeout=30, start_timeout=30)


def _parameters(task: Any) -> dict[str, list[float]]:
    return {name: p.flatten().tolist() for name, p in task.bare_model.named_parameters()}


# --- DDP-a ---


def _uneven(folder: Path, counts: tuple[int, ...], **more: Any) -> dict[str, Any]:
    stream = streams.Shared(sum(counts), counts=counts)
    data = Data(stream, BATCH, **more)
    task = r1.make_task(folder, train=data, epochs=2, backend=backend())
    outcome = Trainer(task, r1.make_hooks()).train()
    return {"updates": outcome.updates, "status": outcome.status, "samples": task.progress.samples,
            "epochs": task.progress.epoch, "parameters": _parameters(task)}  # fmt: skip


@pytest.mark.parametrize(("workers", "counts"), [(0, (20, 28)), (2, (16, 24))])
def test_ddp_a_all_end_a_pass_together_and_the_log_counts_what_is_left_out(
    tmp_path: Path, workers: int, counts: tuple[int, int]
) -> None:
    """Of 5 and 7 batches, of 4 and 6; four samples of each process in a batch."""
    batches = counts[0] // 4
    ended = ranks.run(_uneven, tmp_path / "run", counts, workers=workers)
    for one in ended:
        assert one.code == 0, one.output
        assert one.value["updates"] == 2 * batches
        assert one.value["samples"] == 2 * batches * 8
        assert one.value["epochs"] == 2
    log = (tmp_path / "run" / "log.txt").read_text()
    for epoch in (1, 2):
        assert (
            f"data.train: epoch {epoch} ended for all after {batches} batches, since rank 0 had "
            f"nothing left; left out: 8 samples of rank 1" in log
        )
    assert ended[0].value["parameters"] == ended[1].value["parameters"]


def test_ddp_a_a_process_without_any_sample_is_named_and_ends_the_job(tmp_path: Path) -> None:
    """Of 0 and 3 batches."""
    first, second = ranks.run(_uneven, tmp_path / "run", (0, 12), limit=30)
    assert first.code == second.code == 1
    message = "data.train: the stream is empty: it gave no sample in its first pass, on rank 0"
    assert f"DataError: {message}" in first.output
    assert f"PeerError: {message}" in second.output


class _Slow(streams.Shared):
    """Takes its time where nobody trains any more."""

    def __iter__(self) -> Any:
        for number, sample in enumerate(super().__iter__()):
            if number > 12:
                time.sleep(0.3)
            yield sample


def _long(folder: Path) -> int:
    """Rank 1 has 100 batches, which take two minutes to read."""
    data = Data(_Slow(408, counts=(8, 400)), BATCH)
    task = r1.make_task(folder, train=data, epochs=1, backend=backend())
    return Trainer(task, {}).train().updates


def test_ddp_a_what_takes_long_to_count_is_said_to_be_more(tmp_path: Path) -> None:
    ended = ranks.run(_long, tmp_path / "run")
    assert [one.value for one in ended] == [2, 2], ended[0].output
    assert "left out: at least " in (tmp_path / "run" / "log.txt").read_text()


# --- the update is that of the whole batch ---


class Numbers(IterableDataset[Any]):
    """Numbers of each process."""

    def __init__(self, xs: list[list[float]]) -> None:
        self.xs = xs

    def set_rank(self, rank: int, world_size: int) -> None:
        assert world_size == len(self.xs)
        self.rank = rank

    def __iter__(self) -> Any:
        return (torch.tensor([x]) for x in self.xs[self.rank])


CUTS: list[dict[str, int]] = [
    {},
    {"micro_batch_size": 2},
    {"micro_batch_size": 1},
    {"accumulate": 2},
    {"accumulate": 3},
]


def _weights() -> list[tuple[float, int, int]]:
    joined, found = pairs.ddp(), []
    for cut in CUTS:
        data = Data(Numbers([[1, 2, 3, 4], [10, 20, 30]]), 5, **cut)
        task = r0.r0([0], 5, train=data, backend=joined)
        r0.train(task)
        found.append((r0.weight(task), task.progress.updates, task.progress.samples))
    return found


def test_the_update_is_the_mean_over_all_processes_however_a_share_is_cut() -> None:
    """A batch of 5 is 3 and 2. (1 + 2 + 3 + 10 + 20) / 5 = 7.2, then (4 + 30) / 2 = 17."""
    for found in ranks.results(_weights):
        for weight, updates, samples in found:
            assert weight == pytest.approx(-24.2, abs=1e-5)
            assert (updates, samples) == (2, 7)


def _passes() -> list[tuple[int, int]]:
    """By cut: micro-batches in each window, of which some have weight 0."""
    joined, found = pairs.ddp(), []
    for cut in CUTS:
        data = Data(Numbers([[1, 2, 3, 4], [10, 20, 30]]), 5, **cut)
        probe = watch("on_step", lambda task: task.batch and task.batch.weight)
        r0.train(r0.r0([0], 5, train=data, backend=joined), probe=probe)
        found.append(probe.seen)
    return found


def test_all_processes_go_through_the_model_equally_often() -> None:
    """As often as the largest share of a whole batch takes: stand-ins have weight 0."""
    first, second = ranks.results(_passes)
    expected = [
        ([3, 1], [2, 1]),
        ([2, 1, 1, 0], [1, 1, 1, 0]),
        ([1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0]),
        ([2, 1, 1, 0], [1, 1, 1, 0]),
        ([1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0]),
    ]
    assert list(zip(first, second, strict=True)) == expected


# --- lengths, limits, passes ---


def _lengths() -> list[Any]:
    """Updates, epochs, and what each of several trainings says."""
    joined, found = pairs.ddp(), []
    cases: list[dict[str, Any]] = [
        {"train": Data(streams.Shared(80), BATCH), "epochs": None, "phases": {"updates": 25}},
        {"train": Data(streams.SharedWithLength(80), BATCH), "epochs": 2},
        {"train": Data(streams.SharedWithLength(81), BATCH), "epochs": 1},
        {"train": Data(streams.Shared(81), BATCH), "epochs": 1},
        {"train": Data(streams.SharedWithLength(86), BATCH, drop_last=True), "epochs": 1},
        {"train": Data(streams.Shared(86), BATCH, drop_last=True), "epochs": 1},
        {"train": Data(streams.Shared(80), BATCH, limit=20), "epochs": 2},
        {"train": Data(streams.SharedOnce(80, once=1), BATCH), "epochs": 3},
        {"train": Data(streams.SharedWithLength(80, (80, 40)), BATCH)},
        {"train": Data(streams.SharedWithLength(80, (96,)), BATCH)},
        {"train": Data(streams.Shared(80), 1)},
        {"train": Data(streams.Shared(80), BATCH, limit=1)},
    ]
    for case in cases:
        try:
            task = r1.make_task(None, backend=joined, **case)
            outcome = Trainer(task, {}).train()
            found.append((outcome.updates, task.progress.epoch, task.progress.samples,
                          outcome.reason))  # fmt: skip
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            joined._failed = False  # nobody was left waiting: all have raised
    return found


def test_data_c_lengths_limits_and_passes() -> None:
    for rank, found in enumerate(ranks.results(_lengths, limit=90)):
        assert found[:7] == [
            (25, 3, 200, ""),
            (20, 2, 160, ""),
            # The 81st sample is rank 0's alone: there is no window for both.
            (10, 1, 80, ""),
            (10, 1, 80, ""),
            # 43 each: ten whole shares.
            (10, 1, 80, ""),
            (10, 1, 80, ""),
            # Ten each: 4, 4, 2.
            (6, 2, 40, ""),
        ]
        updates, epoch, _, reason = found[7]
        assert (updates, epoch) == (10, 1)
        assert "data.train is used up after 10 updates" in reason
        assert "ConfigError: data.train.dataset" in found[8]
        assert "(80 on rank 0, 40 on rank 1)" in found[8]
        part = f"for 48 samples in 12 batches of a pass on rank {rank}, of 96 for all 2 processes"
        assert part in found[9]
        assert "it gave 40 samples in 10 batches" in found[9]
        assert "ConfigError: data.train.batch_size: 1 is less than the 2 processes" in found[10]
        assert "ConfigError: data.train.limit: 1 is less than the 2 processes" in found[11]


# --- MET-b ---

SIZES = (1, 2, 3, 4, 5, 8, 9, 12, 13)


def _tests(joined: Processes | None, workers: int = 0) -> dict[str, Any]:
    """A test of sets of several sizes: ids that were seen, and the metrics."""
    kind = streams.Shared
    sets = {f"of{n}": Data(kind(n), 4, workers=workers) for n in SIZES}
    # Six samples in batches of 4, and all of them on the second process.
    counts = (0, 6) if joined is not None else (6,)
    sets["one_sided"] = Data(kind(6, counts=counts), 4, workers=workers)
    seen: dict[str, list[int]] = {}

    class See(Hook):
        def on_forward(self, task: Any) -> None:
            seen.setdefault(task.phase.name, []).extend(task.batch.data["index"].tolist())

    task = r1.make_task(None, train=None, test=sets, epochs=1, backend=joined)
    outcome = Trainer(task, {**r1.make_hooks(), "see": See()}).train()
    return {"seen": seen, "final": dict(outcome.final)}


def _tests_on_processes(workers: int) -> dict[str, Any]:
    return _tests(backend(), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_met_b_every_sample_once_on_two_processes(workers: int) -> None:
    alone = process.result(_tests, None)
    first, second = ranks.results(_tests_on_processes, workers)
    for name, n in [*((f"of{n}", n) for n in SIZES), ("one_sided", 6)]:
        both = first["seen"].get(name, []) + second["seen"].get(name, [])
        assert sorted(both) == list(range(n)) == sorted(alone["seen"][name]), name
        assert first["final"][f"{name}/accuracy"] == alone["final"][f"{name}/accuracy"]
        # The loss's sum is added up in another order.
        loss = alone["final"][f"{name}/loss"]
        assert first["final"][f"{name}/loss"] == pytest.approx(loss, rel=1e-6)
    assert first["final"] == second["final"]
    assert "one_sided" not in first["seen"]


def _sharded() -> dict[str, Any]:
    """With fsdp, under which all go through the model together, also in a test."""
    seen: list[int] = []
    passes = 0

    class See(Hook):
        def on_forward(self, task: Any) -> None:
            nonlocal passes
            if not task.train:
                passes += 1
                seen.extend(task.batch.data["index"].tolist() if task.batch.weight else [])

    task = r1.make_task(
        None,
        train=Data(streams.Shared(28, counts=(12, 16)), BATCH, micro_batch_size=3),
        test={"test": Data(streams.Shared(9, counts=(8, 1)), 4, micro_batch_size=1)},
        epochs=1,
        optimizer=lambda model: r1.optimizer("sgd", model),
        backend=Fsdp("cpu", timeout=30, start_timeout=30),
    )
    outcome = Trainer(task, {**r1.make_hooks(), "see": See()}).train()
    return {"seen": seen, "passes": passes, "updates": outcome.updates,
            "accuracy": outcome.final["test/accuracy"]}  # fmt: skip


def test_met_b_with_fsdp_who_has_run_out_goes_on_unmeasured() -> None:
    """Eight samples and one: four batches of four, in two micro-batches on each process."""
    first, second = ranks.results(_sharded)
    assert (first["updates"], second["updates"]) == (3, 3)
    # In the order 7 i the ninth is 8 * 7 = 6 * 9 + 2.
    assert (sorted(first["seen"]), second["seen"]) == ([0, 1, 3, 4, 5, 6, 7, 8], [2])
    assert first["passes"] == second["passes"] == 4 * 2
    assert first["accuracy"] == second["accuracy"]
    assert 9 * first["accuracy"] == pytest.approx(round(9 * first["accuracy"]), abs=1e-9)


def _empty_test() -> None:
    test = {"test": Data(streams.Shared(0), 4)}
    Trainer(r1.make_task(None, train=None, test=test, backend=backend()), {}).train()


def test_data_b_a_test_stream_that_is_empty_on_all_is_an_error_by_name() -> None:
    for ended in ranks.run(_empty_test):
        assert ended.code == 1
        assert "DataError: data.test: the stream is empty" in ended.output


# --- DATA-f ---


class _NoneOnRank1:
    """Collates nothing of sample 12, which rank 1 has in its second batch.

    Of a batch of 8 in order that is 12 to 15. In the stream's first epoch it is the 14th, since
    7 * 13 + 1 = 2 * 40 + 12, and the 5th of rank 1, which begins with the 10th.
    """

    def __call__(self, samples: list[Any]) -> Any:
        if 12 in [sample["index"] for sample in samples]:
            return None
        return torch.utils.data.default_collate(samples)


def _none(kind: str) -> None:
    if kind == "stream":
        data = Data(streams.Shared(40, counts=(9, 31)), BATCH, collate=_NoneOnRank1())
    else:
        data = Data(r1.Samples(40), BATCH, shuffle=False, collate=_NoneOnRank1())
    Trainer(r1.make_task(None, train=data, epochs=1, backend=backend()), {}).train()


@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_data_f_none_on_one_process_is_a_clear_error(kind: str) -> None:
    ended = ranks.run(_none, kind, limit=40)
    assert all(one.code == 1 for one in ended)
    message = "DataError: data.train: the collate function gave None for update 2 on rank 1."
    assert message in ended[1].output


# --- a stream that is not shared out ---


def _unaware(kind: str) -> list[str]:
    made = {"unaware": streams.Stateful, "shared": streams.Shared}[kind]
    test = {"test": Data(made(12), 4)}
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("phaseloop").addHandler(Keep())
    task = r1.make_task(None, train=Data(made(16), BATCH), test=test, epochs=2, backend=backend())
    Trainer(task, r1.make_hooks()).train()
    return [m for m in messages if "set_rank" in m]


def test_a_stream_that_every_process_reads_as_a_whole_is_warned_of() -> None:
    messages, others = ranks.results(_unaware, "unaware")
    assert others == []
    assert [m.split(":")[0] for m in messages] == ["data.train.dataset", "data.test.dataset"]
    assert all("the first batch of rank 1 is that of rank 0" in m for m in messages)
    assert all("every sample comes 2 times" in m for m in messages)
    assert ranks.results(_unaware, "shared") == [[], []]


# --- RES ---


def _train(folder: Path, kind: str, workers: int, at: r1.At | None = None) -> dict[str, Any]:
    """R1 on a stream of 60 samples, three of each process in a batch, in pieces of two."""
    made = {"stateful": streams.Shared, "plain": streams.SharedPlain}[kind]
    return r1.train(
        folder,
        equal.probe_of(folder),
        train=Data(made(60, augment=True), 6, workers=workers, micro_batch_size=2),
        test={"test": Data(made(6, augment=True), 4, workers=workers)},
        phases={"test_every_updates": 8},
        hooks={} if at is None else {"at": at},
        save={"every_updates": 3},
    )


@pytest.mark.parametrize(
    ("kind", "workers", "at"),
    [
        ("stateful", 0, r1.At("on_step", 14)),
        ("plain", 0, r1.At("on_step", 14, signal.SIGTERM, rank=1)),
        ("stateful", 2, r1.At("on_step", 14, signal.SIGTERM, rank=1)),
        ("stateful", 0, r1.At("on_step", 16, phase="test")),
    ],
)
def test_res_a_an_interrupted_pass_goes_on_with_the_very_next_sample(
    tmp_path: Path, kind: str, workers: int, at: r1.At
) -> None:
    """In epoch 2, of 10 batches."""
    whole, rough = tmp_path / "whole", tmp_path / "rough"
    ranks.results(_train, whole, kind, workers)
    for ended in ranks.run(_train, rough, kind, workers, at):
        if at.action == signal.SIGTERM:
            assert (ended.code, ended.value["status"]) == (0, "stopped"), ended.output
        else:
            assert ended.code == -signal.SIGKILL, ended.output
    ranks.results(_train, rough, kind, workers)
    equal.assert_eq(whole, rough)
    seen = []
    for rank in (0, 1):
        lines = r1.lines(r1.probe_of_rank(equal.probe_of(whole), rank), "update")
        seen += [i for line in lines if line["epoch"] == 2 for i in line["ids"]]
    assert sorted(seen) == list(range(60))


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks.results(_train, folder, "stateful", 0, r1.At("on_step", 14, "stop"))
    for processes in (1, 3):
        for ended in ranks.run(_train, folder, "stateful", 0, processes=processes):
            assert ended.code == 1
            assert f"backend.processes: {processes} now and 2 in the checkpoint" in ended.output
