"""What a thousand processes and a billion samples cost each process, by simulation on one machine.

Nothing is sent anywhere: one process is measured as if it were one of many. A table for the data:

* ``memory``: what a process needs for the order of its data, at its peak while it is made;
* ``start``, ``resume``: until the first batch of an epoch, and of its middle, is there;
* ``batch``: a process's share of a batch, the mean over some batches at the epoch's start, middle
  and end; the dataset gives the indices back, so that nothing but the engine's own work counts.

And one for a checkpoint: what each process has of its own, sent to the primary, written, and read.

Each row is a process of its own. Times are those of its processor, so that others on the machine
count little. The exit code is 1 where a bar is not held.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phaseloop import Accuracy, Data, Mix, Phases, Run, Sampler, Source, Task, TensorData
from phaseloop.engine import agreement
from phaseloop.engine.backends import Single
from phaseloop.engine.checkpoint import contents, rank_state, store
from phaseloop.engine.checkpoint.snapshot import Snapshot
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.plan import BatchPlan, Window

MEGABYTE = 2**20
BARS = {
    "memory": 200.0,  # megabytes, of an order that does not depend on the samples' own values
    "bytes a sample": 32.0,  # of one that goes by a label or a weight of each
    "batch": 2.0,  # milliseconds; in a mix, of each source
    "batch with classes": 20.0,  # the same where each class's permutation is made when it is met
    "resume": 100.0,  # milliseconds more than a start takes, and half of it
    "own state": 64.0,  # kilobytes of one process
    "collect": 1000.0,  # milliseconds that the primary is held up by all processes' states
    "read": 1000.0,  # milliseconds in which a process reads them and takes its own
    "agreement": 1.0,  # milliseconds of one process in a window
}
BATCHES = 30
"""At each place."""

LABELLED = 10_000_000
"""Samples where each has a label or a weight, whose memory grows with them; 1,000 classes."""


class Indices:
    """As many samples as one likes: each is its index."""

    def __init__(self, samples: int, values: Any = None) -> None:
        self.samples = samples
        self.targets = self.weights = values

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Tensor) -> Tensor:
        return indices


def _labels(samples: int) -> Any:
    return np.random.RandomState(0).randint(0, 1000, samples, dtype=np.int32)


def _mix(samples: int) -> Mix:
    third = samples // 3
    return Mix({"a": Source(Indices(third), 2.0), "b": Indices(third), "c": Indices(third)})


def data_cases(samples: int, labelled: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """By name, how many samples, and the options of the set."""
    stored = min(2**24, samples)
    values = {"sampler": labelled}
    return {
        "in order": (samples, {"dataset": Indices(samples), "shuffle": False}),
        "shuffled": (samples, {"dataset": Indices(samples)}),
        "shuffled, 2^24 or fewer": (stored, {"dataset": Indices(stored)}),
        "shuffled, limit 0.01": (samples // 100, {"dataset": Indices(samples), "limit": 0.01}),
        "mix of three": (3 * (samples // 3), {"dataset": _mix(samples)}),
        **{f"sampler {kind}": (labelled, {**values, "sampler": kind}) for kind in SAMPLERS},
    }


SAMPLERS = ("balanced", "weighted")


def make_loader(options: dict[str, Any], batch_size: int, ranks: int, rank: int) -> Loader:
    """The loader of one process, as a run makes it."""
    data = Data(batch_size=batch_size, **options)
    return Loader(
        data, train=True, source=0, seed=0, device=torch.device("cpu"),
        world_size=ranks, rank=rank, key="data.train",
    )  # fmt: skip


def measure_data(options: dict[str, Any], batch_size: int, ranks: int) -> dict[str, float]:
    """One process in the middle of many."""
    if (kind := options.get("sampler")) is not None:
        labelled = options["labelled"]
        values = _labels(labelled) if kind == "balanced" else np.ones(labelled)
        options = {"dataset": Indices(labelled, values), "sampler": Sampler(kind)}
    before = _peak_bytes()
    loader = make_loader(options, batch_size, ranks, ranks // 2)
    windows = loader.windows
    batches = min(BATCHES, windows)
    firsts, means = [], []
    for epoch, first in enumerate((0, windows // 2, windows - batches), 1):
        # Epochs of their own: what one has left in memory does not help the next.
        begun = time.process_time()
        iterator = loader.batches(epoch, 0, first)
        next(iterator)
        firsts.append(time.process_time() - begun)
        times = []
        for _ in range(min(batches, windows - first) - 1):
            begun = time.process_time()
            next(iterator)
            times.append(time.process_time() - begun)
        means.append(statistics.mean(times) if times else 0.0)
    return {
        "memory": (_peak_bytes() - before) / MEGABYTE,
        "start": 1000 * firsts[0],
        "resume": 1000 * firsts[1],
        **{f"batch {place}": 1000 * mean for place, mean in zip(PLACES, means, strict=True)},
    }


PLACES = ("first", "middle", "last")


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def shares(samples: int, batch_size: int, ranks: int) -> int:
    """How many batches of an epoch, of some looked at, are not cut into shares without a gap."""
    plans = [BatchPlan(samples, batch_size, world_size=ranks, rank=rank) for rank in range(ranks)]
    windows = int(plans[0].windows)
    wrong = 0
    for index in {0, 1, windows // 2, windows - 2, windows - 1} & set(range(windows)):
        reached = index * batch_size
        for plan in plans:
            for piece in plan.window(index).pieces:
                if piece.weight:
                    wrong += piece.start != reached
                    reached = piece.stop
        wrong += reached != min(samples, (index + 1) * batch_size)
    return wrong


# --- what processes send and save ---


class Simulated(Single):
    """One process of many that are not there: they sent what this one would."""

    def __init__(self, ranks: int) -> None:
        super().__init__("cpu")
        self.world_size = ranks
        self.sent = b""

    def gather_object(self, value: Any) -> list[Any]:
        if not self.primary:
            self.sent = value
            return []
        return [value, *(bytes(bytearray(self.sent)) for _ in range(self.world_size - 1))]

    def sum_on_host(self, tensor: Tensor) -> Any:
        tensor.mul_(self.world_size)  # all of them have told the same
        return self

    def wait(self) -> None:
        pass


def measure_checkpoint(ranks: int, folder: Path) -> dict[str, float]:
    """Of a small model: what depends on the number of processes, and nothing else."""
    backend = Simulated(ranks)
    model = nn.Linear(4, 2)
    x = torch.zeros(8, 4)
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(x, torch.zeros(8, dtype=torch.int64)), 8),
        train_meters={"accuracy": Accuracy(), "top2": Accuracy(top_k=2)},
        phases=Phases(epochs=1),
        run=Run(str(folder / "run"), threads=1),
        backend=backend,
    )
    backend.world_size = 1
    task.build()
    backend.world_size = ranks
    task.agreement = agreement.Agreement(task)
    for _ in range(10):
        task.record("loss", 0.5)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = work()
        found[name] = 1000 * (time.process_time() - begun)
        return result

    backend.rank = 1
    timed("pack own state", lambda: rank_state.gathered(task))
    backend.rank = 0
    found["own state"] = len(backend.sent) / 1024
    state = timed("collect", lambda: rank_state.gathered(task))
    timed("check", lambda: contents.check_plain(state))
    state = timed("copy", lambda: Snapshot().take(state))
    target = store.Store(folder / "checkpoints")
    name = store.folder_name(1, 1)
    saved = timed("write", lambda: target.write(name, {"state.pt": state}, {}))
    found["state.pt"] = saved.manifest["files"]["state.pt"]["bytes"] / MEGABYTE
    found["manifest"] = len(json.dumps(saved.manifest)) / 1024
    timed("verify", lambda: store.verified(saved.path))
    last = ranks - 1
    timed("read", lambda: rank_state.of_rank(store.load(saved, "state.pt"), last))
    timed("all, for another number", lambda: [rank_state.of_rank(state, r) for r in range(ranks)])
    found["agreement"] = _agreement(task.agreement)
    found["agreement, bytes"] = task.agreement._told.nbytes
    return found


def _agreement(agreed: agreement.Agreement) -> float:
    """Milliseconds of one window, without the way over the network."""
    window, times = Window((), 0, 0), 200
    begun = time.process_time()
    for _ in range(times):
        agreed.begin(window)
        agreed.close(window)
    return 1000 * (time.process_time() - begun) / times


def alone(work: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """What ``work`` gives in a process of its own, so that its memory is its own."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        torch.set_num_threads(1)
        theirs.send(work(*args))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    theirs.close()
    try:
        found: dict[str, float] = ours.recv()
    except EOFError:
        raise SystemExit("a measurement failed; its error is above") from None
    process.join()
    return found


def missed(case: str, samples: int, found: dict[str, float]) -> list[str]:
    """The bars that one row misses."""
    batch = "batch with classes" if case == "sampler balanced" else "batch"
    sources = 3 if case == "mix of three" else 1
    values = {batch: max(found[f"batch {place}"] for place in PLACES) / sources,
              "resume": found["resume"] - 1.5 * found["start"]}  # fmt: skip
    if case.startswith("sampler"):
        values["bytes a sample"] = found["memory"] * MEGABYTE / samples
    else:
        values["memory"] = found["memory"]
    return over(case, values)


def over(case: str, values: dict[str, float]) -> list[str]:
    return [
        f"{case}: {name} is {value:.2f}, more than {BARS[name]:g}"
        for name, value in values.items()
        if name in BARS and value > BARS[name]
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code is 1 where a bar is not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1_000_000_000)
    parser.add_argument("--batch-size", type=int, default=65536)
    parser.add_argument("--labelled", type=int, default=LABELLED)
    options = parser.parse_args(words)
    ranks, batch_size = options.ranks, options.batch_size
    torch.set_num_threads(1)
    problems = []

    print(f"one of {ranks:,} processes; batches of {batch_size:,}; times in ms, memory in MB")
    columns = ["memory", "start", "resume", *(f"batch {place}" for place in PLACES)]
    print(f"{'order':<26}{'samples':>15}" + "".join(f"{name:>14}" for name in columns))
    for case, (samples, made) in data_cases(options.samples, options.labelled).items():
        if case.startswith("sampler"):
            made = {**made, "labelled": options.labelled}
        found = alone(measure_data, made, batch_size, ranks)
        print(f"{case:<26}{samples:>15,}" + "".join(f"{found[name]:>14.2f}" for name in columns))
        problems += missed(case, samples, found)
        if case.startswith("sampler"):
            each = found["memory"] * MEGABYTE / samples
            print(f"{'':<26}that is {each:.0f} bytes a sample, beside its label or weight")
    if wrong := shares(options.samples, batch_size, ranks):
        problems.append(f"{wrong} shares do not meet their neighbours")

    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".benchmark-"))
    try:
        found = alone(measure_checkpoint, ranks, folder)
    finally:
        shutil.rmtree(folder)
    print("\nthe part of a checkpoint that grows with the processes, and their agreement")
    units = {"own state": "kB", "manifest": "kB", "state.pt": "MB", "agreement, bytes": "B"}
    for name, value in found.items():
        print(f"{name:<26}{value:>15.2f} {units.get(name, 'ms')}")
    problems += over("checkpoint", found)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
