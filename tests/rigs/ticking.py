"""Ticking: a training whose parts each take so many seconds by a clock that nothing else moves.

The seconds are powers of two, so a sum of them says what it was made of, and is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phaseloop import Data, Hook, Phases, Task, TensorData
from phaseloop.hooks import timing
from tests.rigs.r0 import Scalar, numbers

DATA, FORWARD, LOSS, METER, BACKWARD, OPTIMIZER, STEP = (2.0**n for n in range(7))
ON_FORWARD, ON_BACKWARD, ON_UPDATE, ON_STEP = (2.0**n for n in range(7, 11))
PREPARE = 2.0**11
SYNC = 2.0**12


class Clock:
    """Stands for ``time`` in the hook's module.

    Attributes:
        now: what it shows.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        """It goes on by so much."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The hook's clock."""
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


class SlowData(TensorData):
    """Each batch takes its time."""

    def __init__(self, clock: Clock, samples: int) -> None:
        super().__init__(*numbers(range(samples)).tensors)
        self.clock = clock

    def fetch(self, indices: Tensor) -> Any:
        self.clock.tick(DATA)
        return super().fetch(indices)


class SlowModel(Scalar):
    """Each forward takes its time, and each backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.tick(FORWARD)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.clock.tick(BACKWARD))
        return output


class SlowSGD(torch.optim.SGD):
    """Each step takes its time."""

    clock: Clock

    def step(self, closure: Any = None) -> Any:
        self.clock.tick(OPTIMIZER)
        return super().step(closure)


class SlowMeter:
    """Each update takes its time."""

    higher_is_better = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __deepcopy__(self, memo: Any) -> SlowMeter:
        return self  # with the one clock

    def update(self, output: Any, target: Any) -> None:
        self.clock.tick(METER)

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None:
        pass

    def to(self, device: torch.device) -> SlowMeter:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def summed(self) -> list[Tensor]:
        return []


def slow_step(clock: Clock, update: bool = True) -> Callable[[Task], None]:
    """The standard step, taking its own time too.

    Args:
        update: it says ``update``; else the engine does.
    """

    def step(task: Task) -> None:
        batch = task.next_batch()
        output = task.forward(batch.input)
        clock.tick(STEP)
        loss = task.criterion(output, batch.target)
        if task.train:
            task.backward(loss)
            if update:
                task.update()

    return step


def slow_hook(clock: Clock, **seconds: float) -> Any:
    """A hook that takes so many seconds at each of these events."""

    def at(much: float) -> Callable[..., None]:
        return lambda self, task: clock.tick(much)

    events = {event: at(much) for event, much in seconds.items()}
    return type("Slow", (Hook,), {"only_watches": True, **events})()


def slow_task(clock: Clock, samples: int = 4, batch_size: int = 2, **options: Any) -> Task:
    """A task whose parts take their time; each micro-batch, of one sample, takes it once."""
    model = options.pop("model", None) or SlowModel(clock)

    def criterion(output: Tensor, target: Any) -> Tensor:
        clock.tick(LOSS)
        return output.mean()

    optimizer: Any = SlowSGD(model.parameters(), lr=1.0)
    optimizer.clock = clock
    settings: dict[str, Any] = {
        "criterion": criterion,
        "optimizer": optimizer,
        "train": Data(SlowData(clock, samples), batch_size, micro_batch_size=1, shuffle=False),
        "train_step": slow_step(clock),
        "train_meters": {"slow": SlowMeter(clock)},
        "phases": Phases(epochs=1),
    }
    return Task(model=model, **{**settings, **options})
