"""Every line marked 2P on meters, decisions, gradients and files: real processes on gloo.

Many checks share a pair of processes: what they give back is compared here.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from phaseloop import Accuracy, Data, Phases, Run, Task, TensorData, TorchSchedule, Trainer
from phaseloop.engine.checkpoint import store
from phaseloop.engine.trainer import registered_defaults
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.early_stop import EarlyStop
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.hooks.metrics_file import MetricsFile
from phaseloop.hooks.row_sync import RowSync
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import equal, process, r1, ranks
from tests.rigs.probes import Scripted, parameters, watch
from tests.rigs.r0 import numbers, r0, train, weight


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


# --- meters ---

SIZES = range(1, 41)


class Count:
    """A user's meter: the number of samples."""

    higher_is_better = None

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)

    def update(self, output: Any, target: Any) -> None:
        self.count += len(output)

    def compute(self) -> Tensor:
        return self.count

    def reset(self) -> None:
        self.count.zero_()

    def to(self, device: torch.device) -> Count:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count.copy_(state["count"])

    def summed(self) -> list[Tensor]:
        return [self.count]


def all_sizes() -> dict[str, float]:
    """The metrics of test sets of every size, eight to a training that moves nothing."""
    found: dict[str, float] = {}
    for first in SIZES[::8]:
        sizes = range(first, first + 8)
        task = r1.make_task(
            None, epochs=1, optimizer=still, backend=ranks.ddp(), data={"limit": 4},
            test={
                f"of{n}": Data(r1.Samples(n), r1.BATCH, micro_batch_size=1 + n % 4) for n in sizes
            },
            test_meters={
                "count": Count(), "accuracy": Accuracy(),
                "theirs": MulticlassAccuracy(2, average="micro", validate_args=False),
            },
        )  # fmt: skip
        found.update(train(task, sync=MeterSync()).final)
    return {name: value for name, value in found.items() if not name.startswith("train")}


def test_met_b_test_sets_of_every_size_count_every_sample_once() -> None:
    one = process.result(all_sizes)
    for size in (2, 3):  # on three, a batch of four is shared as 2, 1, 1
        several = ranks.agreed(ranks.results(all_sizes, processes=size))
        for n in SIZES:
            assert several[f"of{n}/count"] == n
            for exact in ("accuracy", "theirs"):
                assert several[f"of{n}/{exact}"] == one[f"of{n}/{exact}"], n
        assert several == pytest.approx(one, abs=1e-6)


def one_and_zero(folder: Path) -> dict[str, Any]:
    # w stays 1, so a loss is the mean of x: k and 0 for the ranks' shares of update k.
    xs = [1, 1, 0, 0, 2, 2, 0, 0, 3, 3, 0, 0]
    task = r0(
        xs, 4, w=1.0, lr=0.0, backend=ranks.ddp(), test=Data(numbers([1, 0]), 2),
        run=Run(str(folder), log_every=1),
    )  # fmt: skip
    outcome = train(task, sync=MeterSync(), rows=RowSync(), file=MetricsFile())
    return dict(outcome.final)


def test_met_c_both_report_the_mean_over_both(tmp_path: Path) -> None:
    final = ranks.agreed(ranks.results(one_and_zero, tmp_path / "run"))
    assert final["test/loss"] == (1 + 0) / 2
    assert final["train/loss"] == (1 + 2 + 3) / 3 / 2
    rows = equal.rows(tmp_path / "run")
    losses = {row["update"]: row["loss"] for row in rows if "loss" in row}
    assert losses == {1: 0.5, 2: 1.0, 3: 1.5}  # the row of update k includes update k


# --- one decision for all ---


def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def opposite(folder: Path) -> dict[str, Any]:
    """The score has its best in the second epoch on rank 0, and its worst there on rank 1."""
    backend = ranks.ddp()
    scores = [0.5, 0.4, 0.6, 0.7, 0.8, 0.9]
    task = r0(
        [1, 1], 2, lr=1.0, backend=backend, test=Data(numbers([1]), 1),
        schedule=TorchSchedule(plateau, metric="test/score"),
        test_meters={"score": Scripted(scores if backend.primary else [1 - s for s in scores])},
        phases=Phases(epochs=6), run=Run(str(folder)),
    )  # fmt: skip
    outcome = train(
        task, sync=MeterSync(), rate=LearningRate(), stop=EarlyStop("test/score", patience=2),
        save=Checkpoint(keep_last=1, keep_best=1, metric="test/score"),
    )  # fmt: skip
    (group,) = task.optimizers["optimizer"].param_groups
    return {"updates": outcome.updates, "status": outcome.status, "best": dict(task.best),
            "rate": group["lr"], "weight": weight(task)}  # fmt: skip


def test_ddp_c_opposite_scores_have_one_best_one_stop_and_one_plateau(tmp_path: Path) -> None:
    both = ranks.agreed(ranks.results(opposite, tmp_path / "both"))
    assert both["updates"] == 4  # the best in epoch 2, and two without improvement
    assert both["best"]["test/score"] == 0.4
    assert both == process.result(opposite, tmp_path / "one")
    names = store.Store(tmp_path / "both" / "checkpoints").names()
    assert [store.position(name)[0] for name in names] == [2, 4]


# --- one gradient for all ---


def by_hand() -> float:
    task = r0([1, 3, 5, 9], 4, data={"micro_batch_size": 1}, backend=ranks.ddp())
    assert train(task).updates == 1
    return weight(task)


def test_ddp_d_a_window_over_two_ranks_is_one_mean() -> None:
    assert ranks.agreed(ranks.results(by_hand)) == -(1 + 3 + 5 + 9) / 4 == -4.5


MICRO = (1, 2, 5)


def invariant() -> dict[Any, tuple[int, Tensor]]:
    """R1 without dropout in float64, cut in every way and with two optimizers."""
    found = {}
    for name in ("sgd", "adam"):
        for micro in MICRO:
            model = r1.network()
            model[2] = nn.Identity()
            task = r1.make_task(
                None, epochs=2, model=model, optimizer_name=name, precision="float64",
                train=Data(r1.Samples(41), 12, micro_batch_size=micro), backend=ranks.ddp(),
            )  # fmt: skip
            outcome = train(task)
            found[name, micro] = outcome.updates, parameters(task)
    return found


def test_ga_e_neither_processes_nor_micro_batches_change_the_training() -> None:
    found = {size: ranks.agreed(ranks.results(invariant, processes=size)) for size in (1, 2, 3)}
    for name in ("sgd", "adam"):
        _, expected = found[1][name, 5]
        for size, of_size in found.items():
            for micro in MICRO:
                updates, values = of_size[name, micro]
                assert updates == 2 * math.ceil(41 / 12)
                assert values.dtype == torch.float64
                error = float((values - expected).abs().max())
                assert error < 1e-12, f"{name}, {size} processes, micro-batches of {micro}"


# --- buffers, random numbers, files ---


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def buffers(task: Task) -> dict[str, Tensor]:
    return copy.deepcopy(dict(task.bare_model.named_buffers()))


def batch_norm(folder: Path) -> dict[str, Any]:
    task = r1.make_task(folder, epochs=2, test=True, model=normalised(), backend=ranks.ddp())
    before = watch("on_step", lambda task: buffers(task) if task.train else None)
    tested = watch("on_phase_start", lambda task: None if task.train else buffers(task))
    hooks = r1.make_hooks(save={"every_epochs": 1})
    final = Trainer(task, {**hooks, "before": before, "tested": tested}).train().final
    return {"before": [x for x in before.seen if x][-1], "tested": [x for x in tested.seen if x],
            "accuracy": final["test/accuracy"]}  # fmt: skip


def test_ddp_e_buffers_are_equal_when_a_test_starts_and_so_is_the_metric(tmp_path: Path) -> None:
    first, second = ranks.results(batch_norm, tmp_path / "run")
    assert ranks.agreed([first["tested"], second["tested"]])
    # Which is no accident: in training each normalises by its own share.
    assert not torch.equal(first["before"]["1.running_mean"], second["before"]["1.running_mean"])
    model = normalised().eval()
    model.load_state_dict(torch.load(equal.newest(tmp_path / "run").path / "model.pt"))
    data = r1.Samples(r1.TEST_SAMPLES)
    hits = model(data.x).argmax(1).eq(data.y).sum()
    assert first["accuracy"] == second["accuracy"] == float(hits) / r1.TEST_SAMPLES


def dropped() -> dict[str, Any]:
    """Starts from other weights on each rank, and sees ones alone, so that zeros are dropout's."""
    backend = ranks.ddp()
    torch.manual_seed(100 + backend.rank)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 1))
    data = TensorData(torch.ones(8, 16), torch.zeros(8, 1))
    task = Task(
        model=model, criterion=nn.MSELoss(), train=Data(data, 4), phases=Phases(epochs=1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), backend=backend,
    )  # fmt: skip
    masks: list[Tensor] = []
    model[0].register_forward_hook(lambda module, given, output: masks.append(output.bool()))
    first = watch("on_phase_start", parameters)
    train(task, first=first)
    return {"first": first.seen[0], "masks": torch.stack(masks), "last": parameters(task)}


def dropped_twice() -> list[dict[str, Any]]:
    return [dropped(), dropped()]


def test_ddp_f_dropout_differs_by_rank_and_weights_do_not() -> None:
    (a, a_again), (b, b_again) = ranks.results(dropped_twice)
    for name in ("first", "last"):
        ranks.agreed([a[name], b[name]])
    assert a["masks"].shape == (2, 2, 16)  # two batches of four: two samples each
    assert (a["masks"] != b["masks"]).any(dim=-1).all()  # each sample its own
    ranks.agreed([a["masks"], a_again["masks"]])
    ranks.agreed([b["masks"], b_again["masks"]])
    ranks.agreed([a["last"], a_again["last"]])


def with_defaults(folder: Path) -> None:
    task = r1.make_task(folder, epochs=2, test=True, backend=ranks.ddp())
    Trainer(task, {**registered_defaults(), "tensorboard": TensorBoard()}).train()


def test_ddp_g_the_primary_alone_writes_and_speaks(tmp_path: Path) -> None:
    one = process.run(with_defaults, tmp_path / "one")
    several = ranks.run(with_defaults, tmp_path / "both")
    assert [ended.code for ended in (one, *several)] == [0, 0, 0]

    def files(folder: Path) -> list[str]:
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        return sorted("tensorboard" if "events.out" in name else name for name in names)

    assert files(tmp_path / "both") == files(tmp_path / "one")
    updates = [row["update"] for row in equal.rows(tmp_path / "both") if "loss" in row]
    assert len(updates) == len(set(updates)) > 0
    said = [line for line in several[0].output.splitlines() if "epoch" in line]
    assert said and len(said) == len([x for x in one.output.splitlines() if "epoch" in x])
    assert several[1].output == ""


# --- a batch that is nothing ---


class Holes(r1.Samples):
    """Samples of which some are None."""

    def __init__(self, holes: set[int]) -> None:
        super().__init__()
        self.holes = holes

    def __getitem__(self, index: int) -> Any:
        return None if index in self.holes else super().__getitem__(index)


def skip_none(samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    left = [sample for sample in samples if sample is not None]
    return default_collate(left) if left else None


def hole(kind: str) -> tuple[int, Tensor]:
    # In order: batch 3 is 8 to 11, of which rank 1 has 10 and 11.
    backend = ranks.ddp(timeout=20, start_timeout=20)
    options: dict[str, Any] = {}
    data = Data(r1.Samples(), r1.BATCH, shuffle=False)
    if kind == "collate":
        data = Data(Holes({10, 11}), r1.BATCH, shuffle=False, collate=skip_none)
    else:
        options["train_step"] = idle_step
    task = r1.make_task(None, epochs=1, train=data, backend=backend, **options)
    outcome = train(task)
    return outcome.updates, parameters(task)


def idle_step(task: Task) -> None:
    """Does nothing in update 3 of rank 1."""
    batch = task.next_batch()
    if task.progress.updates == 2 and task.backend.rank == 1:
        return
    loss = task.criterion(task.forward(batch.input), batch.target)
    task.backward(loss)
    task.update()


@pytest.mark.parametrize("kind", ["collate", "step"])
def test_data_f_nothing_on_one_rank_is_equal_or_a_clear_error(kind: str) -> None:
    ended = ranks.run(hole, kind)
    if all(one.code == 0 for one in ended):
        updates, values = ranks.agreed([one.value for one in ended])
        assert updates in (9, 10) and values.isfinite().all()
    else:
        assert all(one.code == 1 for one in ended)
        assert "Error: " in ended[1].output
        assert "rank 1" in ended[1].output and "update 3" in ended[1].output
