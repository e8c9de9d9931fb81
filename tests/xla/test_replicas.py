"""Two replicas: one gradient, one decision, one set of meters; and nothing compiled in vain.

Many checks share a process: what its replicas give back is compared here.
"""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Accuracy,
    Data,
    Phases,
    Run,
    Task,
    TensorData,
    TorchSchedule,
    Trainer,
)
from phaseloop.engine import replica
from phaseloop.engine.backends import Xla, joining
from phaseloop.engine.checkpoint import store
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.early_stop import EarlyStop
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.hooks.metrics_file import MetricsFile
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.hooks.row_sync import RowSync
from tests.contract.test_ranks import Count, plateau
from tests.rigs import equal, process, r1, ranks, replicas, streams
from tests.rigs.probes import Scripted, watch
from tests.rigs.r0 import numbers, r0, train


def xla() -> Xla:
    return Xla("cpu", timeout=60, start_timeout=120)


def parameters(task: Task) -> Tensor:
    values = task.backend.to_host([p.detach() for p in task.bare_model.parameters()])
    return torch.cat([value.flatten() for value in values])


# --- in the replicas ---


def by_hand() -> float:
    task = r0([1, 3, 5, 9], 4, data={"micro_batch_size": 1}, backend=xla())
    assert train(task).updates == 1
    return float(parameters(task))


MICRO = (1, 2, 5)


def invariant(backend: str = "xla") -> dict[int, tuple[int, Tensor]]:
    found = {}
    for micro in MICRO:
        model = r1.network()
        model[2] = nn.Identity()
        task = r1.make_task(
            None, epochs=2, model=model, precision="float64",
            train=Data(r1.Samples(41), 12, micro_batch_size=micro),
            backend=xla() if backend == "xla" else None,
        )  # fmt: skip
        found[micro] = train(task).updates, parameters(task)
    return found


def opposite(folder: str) -> dict[str, Any]:
    """The score has its best in the second epoch on rank 0, and its worst there on rank 1."""
    backend = xla()
    scores = [0.5, 0.4, 0.6, 0.7, 0.8, 0.9]
    task = r0(
        [1, 1], 2, lr=1.0, backend=backend, test=Data(numbers([1]), 1),
        schedule=TorchSchedule(plateau, metric="test/score"),
        test_meters={"score": Scripted(scores if backend.primary else [1 - s for s in scores])},
        phases=Phases(epochs=6), run=Run(folder),
    )  # fmt: skip
    outcome = train(
        task, sync=MeterSync(), rate=LearningRate(), stop=EarlyStop("test/score", patience=2),
        save=Checkpoint(keep_last=1, keep_best=1, metric="test/score"),
    )  # fmt: skip
    (group,) = task.optimizers["optimizer"].param_groups
    return {"updates": outcome.updates, "status": outcome.status, "best": dict(task.best),
            "rate": group["lr"], "weight": parameters(task)}  # fmt: skip


def normalised() -> nn.Sequential:
    with replica.one_at_a_time:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def buffers(task: Task) -> dict[str, Tensor]:
    named = dict(task.bare_model.named_buffers())
    return dict(zip(named, task.backend.to_host(list(named.values())), strict=True))


def batch_norm(folder: str) -> dict[str, Any]:
    task = r1.make_task(Path(folder), epochs=2, test=True, model=normalised(), backend=xla())
    before = watch("on_step", lambda task: buffers(task) if task.train else None)
    tested = watch("on_phase_start", lambda task: None if task.train else buffers(task))
    hooks = r1.make_hooks(save={"every_epochs": 1})
    final = Trainer(task, {**hooks, "before": before, "tested": tested}).train().final
    return {"before": [x for x in before.seen if x][-1], "tested": [x for x in tested.seen if x],
            "accuracy": final["test/accuracy"]}  # fmt: skip


def dropped() -> dict[str, Any]:
    """Starts from other weights on each rank, and sees ones alone, so that zeros are dropout's."""
    backend = xla()
    with replica.one_at_a_time:
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
    return {"first": first.seen[0], "masks": torch.stack([mask.cpu() for mask in masks]),
            "last": parameters(task)}  # fmt: skip


def dropped_twice() -> list[dict[str, Any]]:
    return [dropped(), dropped()]


SIZES = (1, 2, 3, 7)


def all_sizes(backend: str = "xla") -> dict[str, float]:
    """The metrics of test sets of several sizes, of a training that moves nothing."""
    task = r1.make_task(
        None, epochs=1, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        backend=xla() if backend == "xla" else None, data={"limit": 4},
        test={f"of{n}": Data(r1.Samples(n), r1.BATCH) for n in SIZES},
        test_meters={"count": Count(), "accuracy": Accuracy()},
    )  # fmt: skip
    found = dict(train(task, sync=MeterSync()).final)
    return {name: value for name, value in found.items() if not name.startswith("train")}


def one_and_zero(folder: str) -> dict[str, Any]:
    xs = [1, 1, 0, 0, 2, 2, 0, 0, 3, 3, 0, 0]
    task = r0(
        xs, 4, w=1.0, lr=0.0, backend=xla(), test=Data(numbers([1, 0]), 2),
        run=Run(folder, log_every=1),
    )  # fmt: skip
    outcome = train(task, sync=MeterSync(), rows=RowSync(), file=MetricsFile())
    return dict(outcome.final)


def poisoned(policy: str) -> tuple[int, float]:
    """The third batch has a value that is no number, in the share of the second rank."""
    xs = [1.0] * 8 + [1, 1, math.nan, 1] + [1.0] * 4
    task = r0(xs, 4, lr=0.5, backend=xla())
    outcome = train(task, guard=NonFinite(policy=policy))
    return outcome.updates, float(parameters(task))


def counted() -> list[int]:
    """Graphs there are after each epoch: with tests, ragged ends, and a rate that moves."""
    task = r1.make_task(
        None, epochs=5, test=True, train=Data(r1.Samples(41), 12, accumulate=2), backend=xla(),
        schedule=r1.schedule("warmup_cosine"),
    )  # fmt: skip
    # Not on_phase_end: a replica may be there while another still compiles for its end.
    seen = watch("on_phase_start", lambda task: replicas.compiled() if task.train else None)
    Trainer(task, {**r1.make_hooks(), "seen": seen}).train()
    return [count for count in seen.seen if count is not None]


class Pairing(nn.Module):
    """Its loss is over all rows of the batch, on whatever process they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def together(samples: int, backend: str = "xla") -> Tensor:
    with replica.one_at_a_time:
        torch.manual_seed(3)
        model = Pairing()

    def step(task: Task) -> None:
        batch = task.next_batch()
        rows = task.backend.gather_with_grad(task.forward(batch.input))
        task.measure(loss := (rows @ rows.T).square().mean(), rows, None)
        task.backward(loss)
        task.update()

    data = TensorData(torch.arange(4.0 * samples).reshape(samples, 4).sin())
    task = Task(
        model=model, train=Data(data, samples, shuffle=False), phases=Phases(epochs=2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), train_step=step,
        backend=xla() if backend == "xla" else None, precision="float64",
    )  # fmt: skip
    train(task)
    return parameters(task)


def tokens(backend: str = "xla") -> Tensor:
    """Losses with a weight of their own: the update is the mean over all elements."""
    with replica.one_at_a_time:
        model = r1.network()
    model[2] = nn.Identity()

    def step(task: Task) -> None:
        batch = task.next_batch()
        each = nn.functional.cross_entropy(
            task.forward(batch.input), batch.target, reduction="none"
        )
        valid = (batch.target == 1).to(each.dtype)
        count = valid.sum()
        task.measure(loss := (each * valid).sum() / count.clamp(min=1), None, None, weight=count)
        task.backward(loss, weight=count)
        task.update()

    task = r1.make_task(
        None, epochs=2, model=model, precision="float64", train_step=step, train_meters={},
        train=Data(r1.Samples(17), 6, accumulate=2),
        backend=xla() if backend == "xla" else None,
    )  # fmt: skip
    train(task)
    return parameters(task)


def from_workers() -> Tensor:
    """Both replicas start loader workers of their own, and end them."""
    task = r1.make_task(
        None, epochs=2, augment=True, backend=xla(), train=Data(r1.Samples(8), 4, workers=1)
    )
    train(task)
    return parameters(task)


def uneven() -> tuple[int, Tensor]:
    """Streams of 5 and 7 batches, four samples of each replica in one; the last of the first is
    short.
    """
    counts = (18, 28)
    data = Data(streams.Shared(sum(counts), counts=counts), 8)
    task = r1.make_task(None, train=data, epochs=2, backend=xla())
    return Trainer(task, r1.make_hooks()).train().updates, parameters(task)


def closure() -> Tensor:
    """LBFGS reads the loss within its step."""
    with replica.one_at_a_time:
        model = r1.network()
    model[2] = nn.Identity()
    task = r1.make_task(
        None, epochs=1, model=model, precision="float64", train_step="closure",
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
        train=Data(r1.Samples(8), 4), backend=xla() if joining.found() else None,
    )  # fmt: skip
    train(task)
    return parameters(task)


# --- what comes back ---


@functools.cache
def folder(name: str) -> str:
    return str(Path(tempfile.mkdtemp(dir=process.scratch())) / name)


def once(made: Callable[[], dict[str, list[Any]]]) -> Callable[[], dict[str, list[Any]]]:
    """What it gives, or fails of, the first time: a process is not started again."""
    known: list[Any] = []

    @functools.wraps(made)
    def give() -> dict[str, list[Any]]:
        if not known:
            try:
                known.append(made())
            except Exception as error:
                known.append(error)
        if isinstance(known[0], Exception):
            raise AssertionError("the replicas failed") from known[0]
        return known[0]

    return give


@once
def gradients() -> dict[str, list[Any]]:
    cases = {
        "by_hand": (by_hand, {}),
        "invariant": (invariant, {}),
        "together": (together, {"samples": 8}),
        "ragged": (together, {"samples": 5}),
        "tokens": (tokens, {}),
        "skip": (poisoned, {"policy": "skip"}),
        "workers": (from_workers, {}),
        "uneven": (uneven, {}),
        "closure": (closure, {}),
    }
    return dict(zip(cases, replicas.results(list(cases.values())), strict=True))


@once
def the_rest() -> dict[str, list[Any]]:
    cases = {
        "opposite": (opposite, {"folder": folder("opposite")}),
        "batch_norm": (batch_norm, {"folder": folder("batch_norm")}),
        "dropped": (dropped_twice, {}),
        "sizes": (all_sizes, {}),
        "rows": (one_and_zero, {"folder": folder("rows")}),
        "counted": (counted, {}),
    }
    return dict(zip(cases, replicas.results(list(cases.values())), strict=True))


def test_ddp_d_a_window_over_two_replicas_is_one_mean() -> None:
    assert ranks.agreed(gradients()["by_hand"]) == -(1 + 3 + 5 + 9) / 4 == -4.5


def test_ga_e_neither_replicas_nor_micro_batches_change_the_training() -> None:
    expected = process.result(invariant, "single")
    found = ranks.agreed(gradients()["invariant"])
    for micro in MICRO:
        updates, values = found[micro]
        assert updates == 2 * math.ceil(41 / 12)
        assert float((values - expected[5][1]).abs().max()) < 1e-12, micro


@pytest.mark.parametrize(("case", "samples"), [("together", 8), ("ragged", 5)])
def test_rows_of_all_replicas_with_gradients(case: str, samples: int) -> None:
    expected = process.result(together, samples, "single")
    found = ranks.agreed(gradients()[case])
    assert float((found - expected).abs().max()) < 1e-12


def test_losses_with_weights_are_one_mean_over_all_elements() -> None:
    expected = process.result(tokens, "single")
    found = ranks.agreed(gradients()["tokens"])
    assert float((found - expected).abs().max()) < 1e-12


def test_an_update_that_is_no_number_on_one_is_left_out_on_both() -> None:
    # Three batches of ones are left of four, at a rate of one half.
    assert ranks.agreed(gradients()["skip"]) == (3, -1.5)


def test_ddp_a_streams_of_unequal_length_end_together() -> None:
    updates, _ = ranks.agreed(gradients()["uneven"])
    assert updates == 2 * math.ceil(18 / 4)


def test_each_replica_has_workers_of_its_own() -> None:
    ranks.agreed(gradients()["workers"])


def test_an_optimizer_that_calls_a_closure_sees_the_loss_of_all() -> None:
    expected = process.result(closure)
    found = ranks.agreed(gradients()["closure"])
    assert float((found - expected).abs().max()) < 1e-10


def test_ddp_c_opposite_scores_have_one_best_one_stop_and_one_plateau() -> None:
    both = ranks.agreed(the_rest()["opposite"])
    assert both["updates"] == 4  # the best in epoch 2, and two without improvement
    assert both["best"]["test/score"] == 0.4
    names = store.Store(Path(folder("opposite")) / "checkpoints").names()
    assert [store.position(name)[0] for name in names] == [2, 4]


def test_ddp_e_buffers_are_equal_when_a_test_starts_and_so_is_the_metric() -> None:
    first, second = the_rest()["batch_norm"]
    assert ranks.agreed([first["tested"], second["tested"]])
    assert not torch.equal(first["before"]["1.running_mean"], second["before"]["1.running_mean"])
    model = normalised().eval()
    model.load_state_dict(torch.load(equal.newest(Path(folder("batch_norm"))).path / "model.pt"))
    data = r1.Samples(r1.TEST_SAMPLES)
    hits = model(data.x).argmax(1).eq(data.y).sum()
    assert first["accuracy"] == second["accuracy"] == float(hits) / r1.TEST_SAMPLES


def test_ddp_f_dropout_differs_by_rank_and_weights_do_not() -> None:
    (a, a_again), (b, b_again) = the_rest()["dropped"]
    for name in ("first", "last"):
        ranks.agreed([a[name], b[name]])
    assert a["masks"].shape == (2, 2, 16)
    assert (a["masks"] != b["masks"]).any(dim=-1).all()
    ranks.agreed([a["masks"], a_again["masks"]])
    ranks.agreed([b["masks"], b_again["masks"]])
    ranks.agreed([a["last"], a_again["last"]])


def test_met_b_test_sets_of_several_sizes_count_every_sample_once() -> None:
    one = process.result(all_sizes, "single")
    several = ranks.agreed(the_rest()["sizes"])
    for n in SIZES:
        assert several[f"of{n}/count"] == n
        assert several[f"of{n}/accuracy"] == one[f"of{n}/accuracy"]
    assert several == pytest.approx(one, abs=1e-6)


def test_met_c_both_report_the_mean_over_both() -> None:
    final = ranks.agreed(the_rest()["rows"])
    assert final["test/loss"] == (1 + 0) / 2
    assert final["train/loss"] == (1 + 2 + 3) / 3 / 2
    rows = equal.rows(Path(folder("rows")))
    losses = {row["update"]: row["loss"] for row in rows if "loss" in row}
    assert losses == {1: 0.5, 2: 1.0, 3: 1.5}


def test_nothing_is_compiled_once_every_kind_of_step_was_there() -> None:
    counts = copy.copy(the_rest()["counted"][0])
    assert counts[2] == counts[-1], counts
