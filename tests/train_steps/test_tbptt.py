"""Step tbptt, where its state is carried on: which data do not fit is said at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Data, Phases, Run, Stage, Task, TensorData, Trainer
from phaseloop.train_steps import TruncatedBackpropagation

LANES = 3


class Lanes(TensorData):
    """Twelve samples of four time steps: of three lanes four chunks each."""

    lanes = LANES

    def __init__(self) -> None:
        super().__init__(torch.ones(12, 4, 2), torch.zeros(12, 4, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 2, batch_first=True)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, state = self.gru(x, state)
        return output, state


def plain_step(task: Task) -> None:
    batch = task.next_batch()
    output, _ = task.forward(batch.input)
    loss = task.criterion(output, batch.target)
    if task.train:
        task.backward(loss)
        task.update()


def train(stateful: bool = True, **options: Any) -> int:
    model = Recurrent()
    given = {
        "train": Data(Lanes(), LANES, shuffle=False),
        "train_step": TruncatedBackpropagation(2, stateful=stateful),
        "phases": Phases(updates=5),
    }
    task = Task(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        run=Run(threads=1),
        **{**given, **options},
    )
    return int(Trainer(task, {}).train().updates)


def test_as_many_as_there_are_lanes() -> None:
    assert train(test=Data(Lanes(), LANES)) == 5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"train": Data(Lanes(), 4, shuffle=False)},
            r"data\.train\.batch_size: 4 is not 3, the lanes of the dataset",
        ),
        (
            {"train": Data(Lanes(), {1: 3, 2: 6}, shuffle=False)},
            r"data\.train\.batch_size: \{1: 3, 2: 6\} is not 3",
        ),
        ({"test": Data(Lanes(), 12)}, r"data\.test\.batch_size: 12 is not 3"),
        (
            {"test": {"near": Data(Lanes(), 3), "far": Data(Lanes(), 6)}},
            r"data\.test\.far\.batch_size: 6 is not 3",
        ),
        (
            {"train": Data(Lanes(), LANES, shuffle=False, limit=9)},
            r"data\.train\.limit: 9 leaves out samples here and there",
        ),
        ({"test": Data(Lanes(), LANES, limit=0.5)}, r"data\.test\.limit: 0\.5 leaves out"),
    ],
)
def test_batches_that_do_not_go_on_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(**options)


def test_without_a_state_it_is_all_the_same() -> None:
    assert train(stateful=False, train=Data(Lanes(), 4, limit=9)) == 5


def test_what_other_stages_read_is_their_affair() -> None:
    """A stage with another step may shuffle, and test on what it likes."""
    stages = [
        Stage(name="carried", updates=2, test_sets=["own"]),
        Stage(
            name="plain", updates=3, train=Data(Lanes(), 4), train_step=plain_step,
            test_sets=["other"],
        ),
    ]  # fmt: skip
    sets = {"own": Data(Lanes(), LANES), "other": Data(Lanes(), 5, limit=7)}
    assert train(phases=stages, test=sets) == 5


def test_a_stages_own_data_are_named_there() -> None:
    stages = [
        Stage(name="first", updates=1),
        Stage(name="second", updates=1, train=Data(Lanes(), LANES)),
    ]
    with pytest.raises(ConfigError, match=r"set phases\.second\.data\.train\.shuffle=false"):
        train(phases=stages)
