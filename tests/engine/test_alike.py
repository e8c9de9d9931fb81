"""Processes that would train different models, or stop for ever, end with an error by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Phases, Run, Schedule, Task, TensorData
from phaseloop.engine.checkpoint import choosing
from phaseloop.engine.checkpoint.weights import Weights
from phaseloop.engine.schedules.curves import cosine
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.learning_rate import LearningRate
from tests.rigs import pairs
from tests.rigs.pairs import Case, Failed


def samples(count: int = 12) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return TensorData(x, (x.sum(1) > 0).long())


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def make(lr: float = 0.1, data: Any = None, count: int = 12, **options: Any) -> Task:
    settings: dict[str, Any] = {
        "model": network(),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        "train": Data(samples(count), batch_size=4, **(data or {})),
        "phases": Phases(epochs=1),
        "backend": pairs.ddp(),
    }
    return Task(**{**settings, **options})


def different(key: str) -> str:
    """What a training says in which the second process has something else."""
    second = pairs.rank() == 1
    try:
        pairs.train(make(**(CASES[key][0] if second else CASES[key][1])))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def _config(**config: Any) -> dict[str, Any]:
    return {"config": config}


# By name: what the second process has, what the first has, and what both say.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rate": ({"lr": 0.01}, {}, "ConfigError: optimizers.optimizer.group 0.lr: 0.1 on rank 0, 0.01"),
    "seed": ({"seed": 7}, {}, "ConfigError: seed: 0 on rank 0, 7 on rank 1"),
    "length": ({"count": 11}, {}, "DataError: data.train.samples: 12 on rank 0, 11 on rank 1"),
    "cut": (
        {"data": {"micro_batch_size": 1}}, {},
        "ConfigError: data.train.micro_batch_size: nothing on rank 0, 1 on rank 1",
    ),
    "end": ({"phases": Phases(epochs=2)}, {}, "ConfigError: phases.epochs: 1 on rank 0, 2 on rank"),
    "weights": (
        {"weights": "there.pt"}, {}, "ConfigError: model.weights: 'none' on rank 0, 'given' on rank"
    ),
    "configuration": (
        _config(hooks={"early_stop": {"patience": 2}}),
        _config(hooks={"early_stop": {"patience": 3}}),
        "ConfigError: hooks.early_stop.patience: 3 on rank 0, 2 on rank 1",
    ),
    "machine": (
        _config(run={"threads": 1}, data={"train": {"workers": 2, "dataset": {"root": "/b/x"}}}),
        _config(run={"threads": 2}, data={"train": {"workers": 0, "dataset": {"root": "/a/x"}}}),
        "trained",
    ),
}  # fmt: skip


def file_of_another(folder: Path) -> str:
    path = folder / f"weights-{pairs.rank()}.pt"
    torch.save(network(pairs.rank()).state_dict(), path)
    try:
        pairs.train(make(weights=str(path)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def same_file_elsewhere(folder: Path) -> str:
    path = folder / f"same-{pairs.rank()}.pt"
    with open(path, "wb") as file:  # of a path torch would write the name into it
        torch.save(network(5).state_dict(), file)
    pairs.train(make(weights=str(path)))
    return "trained"


def newest_of_a_run(folder: Path) -> dict[str, Tensor]:
    """The run makes another checkpoint after the primary has looked, and before the others do."""
    run = make(run=Run(dir=str(folder / "run"), threads=1), phases=Phases(updates=3))
    pairs.train(run, checkpoint=Checkpoint(every_updates=1, keep_last=3, background=False))
    first, second = sorted((folder / "run" / "checkpoints").glob("update_*"))[:2]
    late, taken = choosing.read_checkpoint, first if pairs.rank() == 0 else second

    def look(where: Any, which: str | None, *rest: Any) -> Any:
        return late(where, which or taken.name, *rest)

    choosing.read_checkpoint = look
    try:
        task = make(weights=Weights(str(folder / "run")), phases=Phases(updates=0), train=None,
                    test=Data(samples(), batch_size=4), optimizer=None)  # fmt: skip
        pairs.train(task)
    finally:
        choosing.read_checkpoint = late
    return dict(task.bare_model.state_dict())


_found: dict[str, list[Any]] = {}


def of_two(name: str, folder: Any) -> list[Any]:
    if not _found:
        place = folder.mktemp("weights")
        good: dict[str, Case] = {
            "same file": (same_file_elsewhere, {"folder": place}),
            "newest": (newest_of_a_run, {"folder": place}),
        }
        bad: dict[str, Case] = {key: (different, {"key": key}) for key in CASES}
        bad["another file"] = (file_of_another, {"folder": place})
        cases = {**good, **bad}
        _found.update(zip(cases, pairs.results(list(cases.values())), strict=True))
    return _found[name]


@pytest.mark.parametrize("key", CASES)
def test_what_differs_is_named_with_both_values(
    key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = of_two(key, tmp_path_factory)
    assert first == second
    assert first.startswith(CASES[key][2]), first


def test_weights_may_lie_elsewhere_and_not_be_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assert of_two("same file", tmp_path_factory) == ["trained", "trained"]
    first, second = of_two("another file", tmp_path_factory)
    assert first == second
    assert first.startswith("ConfigError: model.weights.sha256: ")


def test_the_primary_chooses_the_newest_checkpoint_for_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second = of_two("newest", tmp_path_factory)
    assert not isinstance(first, Failed), first
    for key, value in first.items():
        assert torch.equal(second[key], value)


# --- what goes to the file of one process ---


class Says(Hook):
    """Leaves out an update on all processes; the second has something of its own to say."""

    def on_gradients(self, task: Task) -> None:
        if task.progress.steps == 1:
            task.skip_update("the test asks for it")
            if pairs.rank() == 1:
                logging.getLogger("phaseloop").warning("of rank 1 alone")


def said(folder: Path) -> list[str]:
    """What the files of the processes say, by rank, of a run that goes on and was made longer."""
    for epochs in (1, 2):
        task = make(run=Run(dir=str(folder), threads=1), phases=Phases(epochs=epochs),
                    schedule=Schedule(cosine()))  # fmt: skip
        pairs.train(task, says=Says(), checkpoint=Checkpoint(), learning_rate=LearningRate())
    own = folder / "ranks" / "log-1.txt"
    return [(folder / "log.txt").read_text(), own.read_text() if own.exists() else ""]


def test_what_all_say_alike_the_primary_says(tmp_path: Path) -> None:
    ((_, found),) = pairs.results([(said, {"folder": tmp_path})])
    assert not isinstance(found, Failed), found
    first, second = found
    for text in ("update 2 was skipped", "the run was planned for 3 updates"):
        assert text in first and text not in second
    assert "of rank 1 alone" in second


# --- a step that gives weights now and then ---


def weighted(gives: list[list[bool]]) -> str:
    """What a training says whose step gives a weight at these updates, by rank."""

    def step(task: Task) -> None:
        batch = task.next_batch()
        loss = task.criterion(task.forward(batch.input), batch.target)
        weight = float(len(batch.target)) if gives[pairs.rank()][task.progress.updates] else None
        task.backward(loss, weight=weight)
        task.update()

    try:
        pairs.train(make(train_step=step))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


ALWAYS, NEVER = [True] * 3, [False] * 3


def test_a_weight_that_one_process_gives_is_an_error_and_no_wait() -> None:
    cases: list[list[list[bool]]] = [
        [ALWAYS, ALWAYS], [NEVER, NEVER], [ALWAYS, NEVER], [[False, False, True]] * 2,
    ]  # fmt: skip
    found = pairs.results([(weighted, {"gives": gives}) for gives in cases])
    assert found[:2] == [["trained"] * 2] * 2
    assert found[2][0] == found[2][1]
    assert "1 of 2 processes called backward() with a weight at update 1" in found[2][0]
    for rank, said in enumerate(found[3]):  # each sees it for itself, and asks nobody
        assert f"rank {rank} called backward() without a weight before, and at update 3" in said
