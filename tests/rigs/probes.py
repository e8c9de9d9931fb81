"""Probes: user code that writes down what it sees, and user code that breaks a run off."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from phaseloop import Hook, Order, Task
from phaseloop.engine.checkpoint import store


class RecordingSGD(torch.optim.SGD):
    """SGD that records, at each step, every group's learning rate and each gradient's sum.

    Attributes:
        rates: per step, one learning rate per group.
        gradients: per step, the sum over all gradients' elements.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rates: list[list[float]] = []
        self.gradients: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append([float(group["lr"]) for group in self.param_groups])
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.gradients.append(sum(float(g.sum()) for g in gradients if g is not None))
        return super().step(closure)


def watch(event: str, look: Callable[[Task], Any], order: int = Order.CHECKPOINT - 1) -> Any:
    """A hook that appends ``look(task)`` to its list ``seen`` at one event.

    Args:
        event: its name, such as ``on_step``.
        look: what to write down.
        order: where the probe stands among the hooks; by default last but for the checkpoint.
    """

    def note(self: Any, task: Task, *_: Any) -> None:
        self.seen.append(look(task))

    # The dispatcher asks the class which events it overrides, so each probe is a class.
    kind = type("Watch", (Hook,), {event: note, "order": order, "only_watches": True})
    hook: Any = kind()
    hook.seen = []
    return hook


def parameters(task: Task) -> Tensor:
    """All parameters of the model, one after another, as they stand."""
    return torch.cat([p.detach().flatten() for p in task.bare_model.parameters()])


class Break(Exception):  # noqa: N818 it is no error of anything
    """What :class:`BreakAt` raises."""


class BreakAt(Hook):
    """Raises when update ``update`` is over and saved, as if the program had died there."""

    order = Order.CHECKPOINT
    saves = True  # it does not, but has to come after what does
    only_watches = True

    def __init__(self, update: int) -> None:
        self.update = update

    def on_step(self, task: Task) -> None:
        if task.updated and task.progress.updates == self.update:
            raise Break(f"update {self.update}")


class SkipAt(Hook):
    """Skips the n-th window of the run, counted from 1, whatever is in it."""

    def __init__(self, *windows: int) -> None:
        self.windows = windows
        self.count = 0

    def on_gradients(self, task: Task) -> None:
        self.count += 1
        if self.count in self.windows:
            task.skip_update("asked for by the test")


class Scripted:
    """A meter that reports scores written down beforehand, one after the other.

    Args:
        scores: the n-th is reported at the end of the n-th phase, over all interruptions.
        higher_is_better: what it tells best-keeping and early stopping.
    """

    def __init__(self, scores: Sequence[float], higher_is_better: bool | None = False) -> None:
        self.scores = list(scores)
        self.higher_is_better = higher_is_better
        self.told = 0

    def update(self, output: Any, target: Any) -> None:
        pass

    def compute(self) -> float:
        self.told += 1
        return self.scores[self.told - 1]

    def reset(self) -> None:
        pass  # the place in the list outlives a phase

    def to(self, device: torch.device) -> Scripted:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["told"]

    def summed(self) -> list[Tensor]:
        return []


class IndexData(Dataset[Any]):
    """Returns the index of a sample as the sample, by ``__getitem__``."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class DrawData(IndexData):
    """A sample is one draw from each of Python's, NumPy's and torch's generators: float64 [3]."""

    def __getitem__(self, index: int) -> Tensor:
        draws = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor(draws, dtype=torch.float64)


class ModeProbe(nn.Module):
    """Passes its input on and records train flag, grad mode and autocast's type.

    Attributes:
        seen: per call, (``training``, grad enabled, autocast's dtype or None).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.seen.append((self.training, torch.is_grad_enabled(), dtype))
        return x


class SlowWrites(Hook):
    """Checkpoints take ``seconds`` longer to write while the run lasts.

    Attributes:
        at_once: how many were being written at the same time, at most.
        written: the names, in the order in which they came to disk.
        updates: ``progress.updates`` at those moments.
    """

    order = Order.SYNC_METERS
    only_watches = True

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds
        self.at_once = 0
        self.written: list[str] = []
        self.updates: list[int] = []

    def on_start(self, task: Task) -> None:
        self._write = write = store.Store.write
        now: list[str] = []

        def slow(this: store.Store, name: str, *args: Any) -> store.Saved:
            now.append(name)
            self.at_once = max(self.at_once, len(now))
            time.sleep(self.seconds)
            saved = write(this, name, *args)
            now.remove(name)
            self.written.append(name)
            self.updates.append(task.progress.updates)
            return saved

        store.Store.write = slow  # type: ignore[method-assign]

    def on_end(self, task: Task, outcome: Any) -> None:
        store.Store.write = self._write  # type: ignore[method-assign]
