"""The training that every way to run has to agree on: in float64, with all that could differ.

41 samples in batches of 12, so that the last batch of an epoch is short; Adam, a schedule,
clipping, averaged weights that are tested, and test phases with built-in and torchmetrics' meters.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from phaseloop import Accuracy, Data, Gradients, Trainer
from phaseloop.engine import registry, replica
from phaseloop.engine.backends import joining
from phaseloop.engine.checkpoint import store
from phaseloop.hooks.average import Average
from tests.rigs import equal, process, r1, ranks, replicas, sharded

SAMPLES, BATCH, EPOCHS = 41, 12, 3
UPDATES = 4
"""In an epoch: three of 12 samples and one of 5."""
PIECES = (1, 3)
"""Micro-batches of a window."""
MOST = 1e-10
"""Largest difference, in float64: only the order of sums is another."""
MIDDLE = 6
"""The update of the second epoch whose checkpoint others resume from."""


_COMPILING = 300.0
"""Seconds that a process gets in which some fifty programs are compiled."""


@dataclass(frozen=True)
class Way:
    """A way to run.

    Attributes:
        backend: its registered name.
        processes: how many.
        options: of the backend.
    """

    backend: str
    processes: int
    options: tuple[tuple[str, Any], ...] = (("device", "cpu"),)

    def __str__(self) -> str:
        return f"{self.backend} x {self.processes}"


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        folder: of the run.
        pieces: micro-batches of a window.
        start: the checkpoint that it resumes from; None: it starts from the beginning.
    """

    folder: str
    pieces: int
    start: str | None = None


class Rows:
    """Ways to run, each with every number of micro-batches; each run is made once.

    Args:
        ways: the first is what the others are compared with.
    """

    def __init__(self, ways: list[Way]) -> None:
        self.ways = ways
        self._rows = [(way, pieces) for way in ways for pieces in PIECES]
        self._folders: dict[Way, dict[int, Path]] = {}

    def check_same(self, way: Way) -> None:
        """It gives what the first gives."""
        for pieces, folder in self._undisturbed(way).items():
            found = list(differences(self._reference(), folder, 0, MOST))
            assert not found, f"{way}, {pieces} micro-batches: {found}"

    def check_goes_on(self, way: Way, place: Path) -> None:
        """It goes on from others' checkpoints as those would have.

        Args:
            place: an empty folder.
        """
        jobs, names = [], []
        for number, (other, pieces) in enumerate(self._rows):
            if other != way:
                continue
            for source, cut in self._sources(number):
                start = middle(self._undisturbed(source)[cut])
                jobs.append(Job(str(place / str(len(jobs))), pieces, str(start)))
                names.append(f"{pieces} micro-batches, from {source} with {cut}")
        run(way, jobs)
        for job, name in zip(jobs, names, strict=True):
            found = list(differences(self._reference(), Path(job.folder), MIDDLE, MOST))
            assert not found, f"{way}, {name}: {found}"

    def _sources(self, number: int) -> list[tuple[Way, int]]:
        """Whose checkpoints a row goes on from: that of the row before it, and one by chance.

        So each row's checkpoint is taken up, and a run handed from row to row would come around.
        """
        others = [row for row in self._rows if row != self._rows[number]]
        return [self._rows[number - 1], random.Random(number).choice(others)]

    def _undisturbed(self, way: Way) -> dict[int, Path]:
        """By the number of micro-batches, folders of undisturbed runs in the same processes."""
        if way not in self._folders:
            place = Path(tempfile.mkdtemp(dir=process.scratch()))
            folders = {pieces: place / str(pieces) for pieces in PIECES}
            run(way, [Job(str(folder), pieces) for pieces, folder in folders.items()])
            self._folders[way] = folders
        return self._folders[way]

    def _reference(self) -> Path:
        return self._undisturbed(self.ways[0])[PIECES[0]]


def run(way: Way, jobs: list[Job]) -> None:
    """The trainings, one after another in the same processes; every process has to end well."""
    if way.processes == 1 and way.backend != "horovod":
        limit = _COMPILING if way.backend == "xla" else process.LIMIT
        process.result_within(limit, _train_all, way, jobs)
        return
    if way.backend == "xla":
        replicas.result(_train_all, way=way, jobs=jobs)
        return
    with ranks.horovod_instead(way.backend == "horovod"):
        ranks.results(_train_all, way, jobs, processes=way.processes)


def middle(folder: Path) -> Path:
    """The checkpoint after update :data:`MIDDLE` of a run."""
    there = store.Store(folder / "checkpoints")
    (name,) = [name for name in there.names() if store.position(name)[0] == MIDDLE]
    return there.folder / name


def differences(reference: Path, folder: Path, after: int, most: float) -> Iterator[str]:
    """What differs by more than ``most``: rows after an update, and the state at the end."""
    expected, found = (
        [row for row in equal.rows(run) if row["update"] > after] for run in (reference, folder)
    )
    if [_kind(row) for row in expected] != [_kind(row) for row in found]:
        yield f"rows: {[_kind(row) for row in expected]}, {[_kind(row) for row in found]}"
        return
    losses = [row for row in found if "loss" in row]
    assert len(losses) == EPOCHS * UPDATES - after
    for a, b in zip(expected, found, strict=True):
        for name, value in a.items():
            if isinstance(value, float) and not abs(value - b[name]) <= most:
                yield f"{name} of update {a['update']}: {value} and {b[name]}"
    for part in ("model", "optimizers", "averages"):
        yield from _apart(part, sharded.saved(reference)[part], sharded.saved(folder)[part], most)


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["update"], row["phase"], tuple(sorted(row))


def _apart(path: str, a: Any, b: Any, most: float) -> Iterator[str]:
    if isinstance(a, Mapping):
        assert list(a) == list(b), path
        for key in a:
            yield from _apart(f"{path}.{key}", a[key], b[key], most)
    elif isinstance(a, list):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _apart(f"{path}.{number}", x, y, most)
    elif isinstance(a, Tensor):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        error = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        if not error <= most:
            yield f"{path}: {error}"
    elif isinstance(a, float):
        if not abs(a - b) <= most:
            yield f"{path}: {a} and {b}"
    elif a != b:
        yield f"{path}: {a} and {b}"


def _train_all(way: Way, jobs: list[Job]) -> None:
    for job in jobs:
        _train(way, job)


def _train(way: Way, job: Job) -> None:
    # Ranks begin with different weights; those of the first have to rule.
    joined = joining.found()
    with replica.one_at_a_time:
        model = r1.network(seed=0 if joined is None else joined.rank)
    model[2] = nn.LayerNorm(8)
    task = r1.make_task(
        Path(job.folder), epochs=EPOCHS, model=model, precision="float64",
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        train=Data(r1.Samples(SAMPLES), BATCH, accumulate=job.pieces),
        test={"test": Data(r1.Samples(7), 4)},
        train_meters=_meters(), test_meters=_meters(), schedule=r1.Plan("warmup_cosine"),
        gradients=Gradients(clip_norm=0.5),
        backend=registry.backends.get(way.backend).target(**dict(way.options)),
        run={} if job.start is None else {"resume": job.start},
    )  # fmt: skip
    hooks = r1.make_hooks(
        save={"every_epochs": None, "every_updates": MIDDLE, "keep_last": 99},
        average=Average("ema", decay=0.8),
    )
    assert task.backend.world_size == way.processes
    outcome = Trainer(task, hooks).train()
    assert outcome.updates == EPOCHS * UPDATES
    assert task.backend.world_size == 1 or torch.distributed.is_initialized() is False


class Auroc(MulticlassAUROC):
    """Of logits. Left alone, it looks in each piece anew whether that holds logits or shares."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output.softmax(dim=1), target)


def _meters() -> dict[str, Any]:
    return {"accuracy": Accuracy(), "macro": MulticlassAccuracy(2), "auroc": Auroc(2)}
