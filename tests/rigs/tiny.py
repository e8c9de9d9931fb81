"""Tiny: a training of milliseconds for the command line: R1's network on 40 samples.

A command line names it by ``imports: [tests.rigs.tiny]`` and ``config=tiny`` (see ``cli.py``).
"""

import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from phaseloop import Hook, Order, register_dataset, register_hook, register_model

SAMPLES = 40
LIMIT = 60.0  # seconds that a probe waits


@register_dataset("tiny_data")
class TinyData(Dataset):
    """40 samples: four numbers, shifted at random, and whether their sum is positive.

    Args:
        samples: how many.
        seconds: time that each read takes.
        marker: a file that is made when the data set is opened.
    """

    def __init__(self, samples: int = SAMPLES, seconds: float = 0.0, marker: str = "") -> None:
        if marker:
            with open(marker, "w"):
                pass
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, 4, generator=generator)
        self.targets = (self.inputs.sum(1) > 0).long()
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index] + random.gauss(0, 0.01), self.targets[index]


@register_model("tiny_model")
class TinyModel(nn.Sequential):
    """Linear, ReLU, dropout, linear."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))


@register_hook("tiny_probe")
class Probe(Hook):
    """Appends a line per update to a file: number, learning rate, a draw; and says when to wait.

    Args:
        file: where the lines go.
        wait_at: after this update, make ``file.waiting`` and sleep in short naps until ``file.go``
            is there; ``file.told`` says that a signal has come meanwhile.
        wait_in_test: the same in the first step of a test phase instead.

    Raises:
        TimeoutError: nobody has made ``file.go``.
    """

    order = Order.DEFAULT
    only_watches = True

    def __init__(self, file: str, wait_at: int | None = None, wait_in_test: bool = False) -> None:
        self.file = file
        self.wait_at = wait_at
        self.wait_in_test = wait_in_test

    def on_step(self, task) -> None:
        if not task.train:
            if self.wait_in_test:
                self._wait(task)
            return
        if task.updated:
            rate = task.optimizers["optimizer"].param_groups[0]["lr"]
            with open(self.file, "a") as file:
                file.write(f"{task.progress.updates} {rate!r} {random.random()!r}\n")
            if task.progress.updates == self.wait_at:
                self._wait(task)

    def _wait(self, task) -> None:
        open(f"{self.file}.waiting", "w").close()
        deadline = time.monotonic() + LIMIT
        while not os.path.exists(f"{self.file}.go"):
            if task.signals.received is not None:
                open(f"{self.file}.told", "w").close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {self.file}.go")
            time.sleep(0.01)


@register_hook("tiny_fault")
class Fault(Hook):
    """Raises ``ValueError("planted fault")`` after update 3."""

    def on_step(self, task) -> None:
        if task.progress.updates == 3:
            raise ValueError("planted fault")


@register_hook("tiny_rank_fault")
class RankFault(Hook):
    """Ends one process of several, or sends it a signal, after an update; ``fault.txt`` says when.

    Args:
        how: ``raise``, ``exit`` or the name of a signal.
        rank: of the process.
        update: after which.
        once: not in a process that was started again.
    """

    only_watches = True

    def __init__(self, how: str, rank: int = 1, update: int = 3, once: bool = False) -> None:
        self.how = how
        self.rank = rank
        self.update = update
        self.once = once

    def on_step(self, task) -> None:
        if not task.train or task.backend.rank != self.rank:
            return
        if task.progress.updates != self.update:
            return
        if self.once and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        Path("fault.txt").write_text(str(time.time()))
        if self.how == "raise":
            raise ValueError("planted fault")
        if self.how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[self.how])


@register_hook("tiny_slow_save")
class SlowSave(Hook):
    """Every checkpoint takes so many seconds more to get to the disk."""

    only_watches = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_start(self, task) -> None:
        write = task.store.write

        def slowly(*args, **options):
            time.sleep(self.seconds)
            return write(*args, **options)

        task.store.write = slowly


@register_hook("tiny_slow_end")
class SlowEnd(Hook):
    """The primary takes so many seconds more for its end."""

    only_watches = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_end(self, task, outcome) -> None:
        if task.primary:
            time.sleep(self.seconds)
