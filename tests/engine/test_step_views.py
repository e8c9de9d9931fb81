"""Step views: views that are not as many as the step wants are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    ConfigError,
    Data,
    Phases,
    Run,
    Stage,
    Task,
    TensorData,
    Trainer,
    register_train_step,
)
from phaseloop.train_steps import TruncatedBackpropagation, closure_train_step, standard_train_step


class Untouched(TensorData):
    """Data that nobody may read."""

    def fetch(self, indices: Any) -> Any:
        raise AssertionError("a sample was read")


def data(views: int, **options: Any) -> Data:
    return Data(Untouched(torch.zeros(8, 4), torch.zeros(8).long()), 4, views=views, **options)


def refused(train: Data | None, **options: Any) -> str:
    model = nn.Linear(4, 2)
    settings: dict[str, Any] = {"phases": Phases(epochs=1), "run": Run(threads=1)}
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=train,
        **{**settings, **options},
    )
    with pytest.raises(ConfigError) as caught:
        Trainer(task, hooks={}).train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("standard", "standard"),
        (standard_train_step, "standard"),
        ("closure", "closure"),
        (closure_train_step, "closure"),
        (TruncatedBackpropagation(2), "tbptt"),
    ],
)
def test_a_step_of_one_input_takes_no_views(step: Any, name: str) -> None:
    said = refused(data(views=2), train_step=step)
    assert said.startswith("data.train.views: 2 makes as many inputs of each batch, and ")
    assert f"the step {name} calls the model with one" in said


def test_the_stage_is_named_whose_step_it_is() -> None:
    def of_pairs(task: Task) -> None:
        """A step of the user's own, which may do with views what it likes."""

    first = Stage(name="first", epochs=1, train=data(views=2), train_step=of_pairs)
    second = Stage(name="second", epochs=1, train=data(views=3))
    said = refused(None, phases=[first, second])
    assert said.startswith("phases.second.data.train.views: 3 makes")


@pytest.mark.parametrize(("views", "augmented"), [(1, True), (3, True), (3, False)])
def test_a_step_of_two_views_wants_two(views: int, augmented: bool) -> None:
    def same(images: Tensor, draws: Any) -> Tensor:
        return images

    train = data(views, augment=same if augmented else None)
    said = refused(train, train_step="contrastive")
    wanted = f"data.train.views: it is {views}, and the step contrastive compares two views"
    assert said.startswith(wanted)


def test_a_registered_check_is_called_with_task_and_step_before_a_sample_is_read() -> None:
    """That of the registration, and of a class its method too."""
    called: list[tuple[str, Any]] = []

    def note(task: Task, step: Any) -> None:
        called.append((type(task).__name__, step))

    class Step:
        def __call__(self, task: Task) -> None:
            task.next_batch()

        def check(self, task: Task) -> None:
            raise ConfigError("train_step", "the method says no")

    name = "checked_in_test_step_views"
    register_train_step(name, check=note, replace=True)(Step)
    assert refused(data(1), train_step=name).startswith("train_step: the method says no")
    ((kind, step),) = called
    assert kind == "Task" and isinstance(step, Step)
