"""What makes another update of a batch that is cut is named at the start, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import Data, Phases, Stage, Task, TensorData
from phaseloop.engine import step_facts
from phaseloop.engine.backends import Single

SIZE = 8


class Norm(nn.Sequential):
    """A linear layer and a batch norm behind it."""

    def __init__(self, norm: nn.Module | None = None, more: bool = False) -> None:
        last = [nn.Linear(3, 3), nn.BatchNorm1d(3)] if more else []
        super().__init__(nn.Linear(4, 3), norm or nn.BatchNorm1d(3), *last)


def warnings(
    caplog: pytest.LogCaptureFixture,
    model: nn.Module | None = None,
    processes: int = 1,
    rank: int = 0,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """What is said of cut batches when a run is built."""
    model = model or nn.Linear(4, 3)
    tensors = TensorData(torch.zeros(20, 4), torch.zeros(20, dtype=torch.int64))
    backend = Single("cpu")
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "train": Data(tensors, SIZE, **(data or {})),
        "phases": Phases(epochs=1),
        "backend": backend,
    }
    task = Task(model=model, **{**settings, **options})
    backend.world_size, backend.rank = processes, rank
    task.build()
    return [r.getMessage() for r in caplog.records if "is cut into" in r.getMessage()]


def across(task: Task) -> None:
    """A step that contrasts samples."""


across.across_samples = True  # type: ignore[attr-defined]

FOUR = {"micro_batch_size": 2}


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"data": FOUR}, 4),
        ({"data": {"accumulate": 3}}, 3),
        ({"processes": 2}, 2),
        ({"processes": 2, "data": FOUR}, 4),
        ({"processes": 3, "data": {"micro_batch_size": 1}}, 9),  # of 8: stand-ins are passes too
    ],
)
def test_a_batch_norm_sees_one_piece(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], pieces: int
) -> None:
    (said,) = warnings(caplog, Norm(), **options)
    assert said == (
        f"a batch is cut into {pieces} pieces, and the statistics of 1 batch norm (1) are those of "
        f"one piece: that is another update than the whole batch would make, and depends on "
        f"micro_batch_size and the number of processes"
    )


def test_a_whole_batch_is_nothing_to_speak_of(caplog: pytest.LogCaptureFixture) -> None:
    transform = {"batch_transform": lambda batch: batch}
    assert warnings(caplog, Norm(), data=transform, train_step=across) == []


def test_what_goes_by_each_sample_alone_may_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, Norm(nn.LayerNorm(3)), processes=2, data=FOUR) == []


def test_frozen_batch_norms_have_no_statistics(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, Norm(), data=FOUR, freeze=["1"]) == []
    untracked = Norm(nn.BatchNorm1d(3, track_running_stats=False))
    untracked[1].eval()  # which changes nothing for such a one
    assert len(warnings(caplog, untracked, data=FOUR)) == 1


def test_synchronised_batch_norms_see_all_processes_but_one_micro_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings(caplog, Norm(nn.SyncBatchNorm(3)), processes=2) == []
    assert len(warnings(caplog, Norm(nn.SyncBatchNorm(3)), processes=2, data=FOUR)) == 1


@pytest.mark.parametrize(
    ("processes", "data", "said"),
    [  # 20 samples in batches of 8: the last has 4
        (4, {}, False),
        (5, {}, True),
        (5, {"drop_last": True}, False),
        (9, {"drop_last": True}, True),
        (5, {"micro_batch_size": 1}, True),
    ],
)
def test_a_stand_in_counts_in_synchronised_statistics(
    caplog: pytest.LogCaptureFixture, processes: int, data: dict[str, Any], said: bool
) -> None:
    found = warnings(caplog, Norm(nn.SyncBatchNorm(3)), processes=processes, data=data)
    assert len(found) == said
    if found and not data.get("micro_batch_size"):
        assert "statistics of 1 batch norm (1) have a sample several times where" in found[0]


def test_one_line_for_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    transform = {"batch_transform": lambda batch: batch, **FOUR}
    (said,) = warnings(caplog, Norm(more=True), data=transform, train_step=across)
    assert "the statistics of 2 batch norms (such as 1) are those of one piece; " in said
    assert "train step 'across' has a loss across samples; " in said
    assert "data.train.batch_transform mixes the samples of one piece: that is" in said


def test_one_line_for_all_stages(caplog: pytest.LogCaptureFixture) -> None:
    stages = [Stage(name="one", epochs=1, train_step=across), Stage(name="two", epochs=1)]
    (said,) = warnings(caplog, Norm(), data=FOUR, phases=stages, train_step="standard")
    assert said.count("batch norm") == said.count("across samples") == 1


def test_the_primary_says_it_for_all(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, Norm(), processes=2, rank=1) == []


def test_only_the_declaration_makes_a_step_one_across_samples() -> None:
    assert step_facts.resolve_step(across)[1].across_samples
    assert not step_facts.resolve_step("standard")[1].across_samples
