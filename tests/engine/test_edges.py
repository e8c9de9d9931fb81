"""Edges of a training: what is refused, what is kept, and what an odd case must not do."""

from __future__ import annotations

import builtins
import copy
import errno
import functools
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    CheckpointError,
    ConfigError,
    Data,
    DataError,
    Gradients,
    Hook,
    NonFiniteError,
    PhaseloopError,
    Phases,
    Run,
    Schedule,
    Task,
    TensorData,
    Warmup,
)
from phaseloop.engine.checkpoint import local, store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.facts import fact_of
from phaseloop.engine.run_folder import RunFolder
from phaseloop.engine.schedules import cosine, linear
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.hooks.non_finite import NonFinite
from tests.rigs.equal import newest
from tests.rigs.probes import Break, BreakAt, IndexData, watch
from tests.rigs.r0 import Scalar, mean_output, numbers, r0, train, weight

NAN = float("nan")
SAMPLES, BATCH = 10, 2
UPDATES = SAMPLES // BATCH
"""Updates in an epoch of :func:`ten`."""


def ten(folder: Path | None, phases: Phases, **options: Any) -> Task:
    """R0 on 10 samples in batches of 2, in a new order each epoch."""
    run = Run(dir=None if folder is None else str(folder))
    return r0(range(SAMPLES), BATCH, data={"shuffle": True}, phases=phases, run=run, **options)


def indices() -> Any:
    """A probe of the samples of every update."""
    return watch("on_step", lambda task: task.batch.indices.tolist())


def status(folder: Path) -> str:
    found: str = json.loads((folder / "status.json").read_text())["status"]
    return found


class StopAt(Hook):
    """Asks for a stop after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.update:
            task.request_stop("asked for by the test")


# --- a state that is not finite ---


def poisoned(folder: Path, policy: str) -> Task:
    """Its third loss is NaN; rows are due later."""
    config = {"hooks": {"non_finite": {"policy": policy}}}
    run = Run(dir=str(folder), log_every=10)
    return r0([1, 2, NAN, 4], 1, run=run, config=config)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    saving = Checkpoint(every_updates=1, keep_last=1)
    with pytest.raises(NonFiniteError):
        train(poisoned(tmp_path, "stop"), finite=NonFinite(), checkpoint=saving)
    saved = newest(tmp_path)
    assert saved.manifest["updates"] == 2
    assert float(store.load(saved, MODEL)["w"]) == -(1 + 2)

    # The message says what helps, and it can be done: the policy may change on a resume.
    task = poisoned(tmp_path, "skip")
    train(task, finite=NonFinite("skip"), checkpoint=Checkpoint())
    assert task.resumed
    assert weight(task) == -(1 + 2 + 4)


class WithNothing(Scalar):
    """Has a parameter of no elements too."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_parameter_without_elements_is_finite(policy: str) -> None:
    model = WithNothing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    task = Task(
        model=model,
        criterion=mean_output,
        optimizer=optimizer,
        train=Data(numbers([1, 2]), 1),
        phases=Phases(epochs=1),
    )
    assert train(task, finite=NonFinite(policy)).status == "finished"
    assert weight(task) == -(1 + 2)


# --- data ---


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_are_started_before_the_first_batch_is_waited_for() -> None:
    data = Data(IndexData(4), 2, workers=2)
    loader = Loader(data, train=True, source=0, seed=0, device=torch.device("cpu"))
    before = len(multiprocessing.active_children())
    try:
        batches = loader.batches(1, 0, 0)
        assert len(multiprocessing.active_children()) == before + data.workers
        assert len(list(batches)) == 4 // 2
        del batches
    finally:
        loader.close()


def test_a_collate_function_that_gives_nothing_does_not_go_on_for_ever() -> None:
    data = Data(IndexData(3), 1, collate=lambda samples: None)
    with pytest.raises(DataError, match="skipped"):
        train(r0([1], 1, train=data, phases=Phases(updates=3)))


def test_a_collate_function_that_would_not_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.collate"):
        r0([1], 1, data={"collate": list})


@pytest.mark.parametrize("option", ["drop_last", "pin_memory"])
def test_an_option_without_effect_is_refused(option: str) -> None:
    data = Data(numbers([1, 2]), 1, **{option: True})
    with pytest.raises(ConfigError, match=rf"data\.test\.{option}"):
        r0([1], 1, test=data)


def test_accumulate_is_a_number_of_micro_batches() -> None:
    task = r0(range(5), 5, data={"accumulate": 4})
    sizes = watch("on_step", lambda task: task.batch.size)
    train(task, sizes=sizes)
    assert sizes.seen == [2, 1, 1, 1]
    assert weight(task) == pytest.approx(-sum(range(5)) / 5, rel=1e-6)


# --- lengths ---


def run_in_parts(folder: Path, *parts: Phases) -> tuple[list[list[int]], Task]:
    """The samples of each update of a run whose length was changed at each resume."""
    seen = []
    for phases in parts:
        probe, task = indices(), ten(folder, phases)
        assert train(task, probe=probe, checkpoint=Checkpoint()).status == "finished"
        seen += probe.seen
    return seen, task


def test_a_run_made_longer_goes_on_with_the_rest_of_the_epoch(tmp_path: Path) -> None:
    seen, task = run_in_parts(tmp_path / "parts", Phases(updates=7), Phases(updates=20))
    whole, _ = run_in_parts(tmp_path / "whole", Phases(updates=20))
    assert seen == whole
    second = seen[UPDATES : 2 * UPDATES]
    assert sorted(chain.from_iterable(second)) == list(range(SAMPLES))
    assert task.progress.epoch == 20 // UPDATES


def test_a_run_whose_limit_of_updates_is_lifted(tmp_path: Path) -> None:
    seen, task = run_in_parts(tmp_path, Phases(epochs=2, updates=7), Phases(epochs=2))
    assert len(seen) == task.progress.updates == 2 * UPDATES
    assert sorted(chain.from_iterable(seen[UPDATES:])) == list(range(SAMPLES))


def test_a_run_made_shorter_ends_at_once(tmp_path: Path) -> None:
    stopped = 2 * UPDATES + 2  # in epoch 3
    first = ten(tmp_path, Phases(epochs=4))
    assert train(first, stop=StopAt(stopped), checkpoint=Checkpoint()).status == "stopped"
    where = watch("on_loop_end", lambda task: task.where)
    task, probe = ten(tmp_path, Phases(epochs=2)), indices()
    assert train(task, probe=probe, where=where, checkpoint=Checkpoint()).status == "finished"
    assert probe.seen == []
    assert task.progress.updates == stopped
    assert where.seen == [1.0]


def test_a_task_with_test_data_only_tests_once() -> None:
    task = Task(
        model=Scalar(2.0),
        criterion=mean_output,
        test=Data(numbers([1, 2, 3]), 2),
        phases=Phases(epochs=3),
    )
    phases = watch("on_phase_start", lambda task: task.phase.name)
    outcome = train(task, phases=phases, sync=MeterSync())
    assert outcome.status == "finished"
    assert outcome.final == {"test/loss": 2.0 * (1 + 2 + 3) / 3}
    assert phases.seen == ["test"]


# --- checkpoints that cannot be used ---


def interrupted(folder: Path) -> list[str]:
    """A run of three epochs that broke off in the third; the names of its two checkpoints."""
    with pytest.raises(Break):
        train(
            ten(folder, Phases(epochs=3)),
            checkpoint=Checkpoint(keep_last=2),
            stop=BreakAt(2 * UPDATES + 1),
        )
    names = store.Store(folder / "checkpoints").names()
    assert len(names) == 2
    return names


def go_on(folder: Path, resume: str = "auto") -> Task:
    task = ten(folder, Phases(epochs=3))
    task.run.resume = resume
    train(task, checkpoint=Checkpoint(keep_last=2))
    return task


@pytest.mark.parametrize("part", [MODEL, store.MANIFEST])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    names = interrupted(tmp_path)

    def stale(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *args: Any, **options: Any) -> Any:
            if Path(path).name == part:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return function(path, *args, **options)

        return read

    with monkeypatch.context() as patch:
        patch.setattr(local, "open", stale(builtins.open), raising=False)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ESTALE)):
            go_on(tmp_path)
    assert store.Store(tmp_path / "checkpoints").names() == names
    assert go_on(tmp_path).resumed


def test_a_checkpoint_of_an_unknown_format_is_not_called_damaged(tmp_path: Path) -> None:
    names = interrupted(tmp_path)
    manifest = tmp_path / "checkpoints" / names[-1] / store.MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(store.seal({**content, "format": store.FORMAT + 1})))
    with pytest.raises(CheckpointError, match=f"format {store.FORMAT + 1}"):
        go_on(tmp_path)
    assert store.Store(tmp_path / "checkpoints").names() == names


def test_with_every_checkpoint_damaged_nothing_starts_anew_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name in interrupted(folder):
        (folder / "checkpoints" / name / MODEL).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="set_aside"):
            go_on(folder)
    task = go_on(folder, resume="never")
    assert not task.resumed
    assert task.progress.updates == 3 * UPDATES


# --- another training in the same folder ---


def adam(beta: float) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.Adam, betas=(beta, 0.999))


def twice(task: Task) -> None:
    raise AssertionError("refused before it is called")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": BATCH + 1}, r"data\.batch_size: 2 -> 3"),
        ({"samples": SAMPLES + 1}, r"data\.samples: 10 -> 11"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"lr": 0.5}, r"optimizers\.optimizer\.group 0\.lr: 1\.0 -> 0\.5"),
        ({"optimizer": adam(0.5)}, r"group 0\.betas: \[0\.9, 0\.999\] -> \[0\.5, 0\.999\]"),
        ({"schedule": Schedule(cosine(end=0.1))}, r"optimizer\.0\.curve\.end: 0\.0 -> 0\.1"),
        ({"schedule": Schedule(linear())}, r"optimizer\.0\.curve\.kind: 'cosine' -> 'linear'"),
        (
            {"schedule": Schedule(cosine(), warmup=Warmup(updates=2))},
            r"schedule\.optimizer\.0\.warmup: None -> {.*'updates': 2",
        ),
        ({"train_step": twice}, r"train_step: \['standard'\] -> \['twice'\]"),
    ],
)
def test_a_task_made_in_python_is_compared_on_a_resume(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    def go(samples: int = SAMPLES, batch_size: int = BATCH, **options: Any) -> Task:
        run = Run(dir=str(tmp_path))
        task = r0(range(samples), batch_size, run=run, epochs=2, **options)
        train(task, checkpoint=Checkpoint(), learning_rate=LearningRate())
        return task

    fixed = {"optimizer": adam(0.9), "schedule": Schedule(cosine())}
    if "lr" in change:
        fixed["optimizer"] = torch.optim.SGD
    go(**fixed)
    with pytest.raises(ConfigError, match=named):
        go(**{**fixed, **change})
    assert go(**fixed).resumed


def test_what_is_compared_has_no_address() -> None:
    """Facts of a new process are those of this one: no object of them is shown by its address."""

    class Thing:
        pass

    facts = fact_of(
        {"a": Thing(), "b": Thing, "c": lambda: 0, "d": {"y", "x"}, "e": torch.tensor(0.5)}
    )
    where = "test_what_is_compared_has_no_address.<locals>"
    assert facts == {
        "a": "Thing", "b": f"{where}.Thing", "c": f"{where}.<lambda>", "d": ["x", "y"], "e": 0.5
    }  # fmt: skip
    many = list(range(100))
    assert fact_of(many) == fact_of(np.array(many)) == fact_of(tuple(many))
    assert fact_of(many) != fact_of(many[::-1])
    assert fact_of((0.9, 0.999)) == fact_of([0.9, 0.999]) == [0.9, 0.999]


# --- errors while a run ends ---


def failing(folder: Path, **hooks: Hook) -> None:
    train(ten(folder, Phases(epochs=1)), checkpoint=Checkpoint(), **hooks)


def test_a_status_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = RunFolder.write_status

    def full(self: RunFolder, status: Any) -> None:
        if status["status"] == "failed":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, status)

    monkeypatch.setattr(RunFolder, "write_status", full)
    with pytest.raises(Break, match="update 2"):
        failing(tmp_path, stop=BreakAt(2))
    assert os.strerror(errno.ENOSPC) in caplog.text


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_while_closing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def state() -> list[Any]:
        return [
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
            torch.are_deterministic_algorithms_enabled(),
            list(logging.getLogger("phaseloop").handlers),
        ]

    def close(self: Loader) -> None:
        raise RuntimeError("the loader does not close")

    before = state()
    hooks: dict[str, Hook] = {"stop": BreakAt(2)} if fails else {}
    during = watch("on_start", lambda task: state())
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "close", close)
        with pytest.raises(Break if fails else RuntimeError):
            failing(tmp_path, during=during, **hooks)
    assert state() == before
    assert all(a != b for a, b in zip(during.seen[0], before, strict=True))
    failing(tmp_path)  # the folder's lock is free
    assert status(tmp_path) == "finished"


def test_a_task_trains_once() -> None:
    task = r0([1], 1)
    train(task)
    with pytest.raises(PhaseloopError, match="trained already"):
        train(task)
    assert weight(task) == -1


# --- optimizers, criteria, precision ---


def test_a_schedule_that_nobody_applies_is_refused() -> None:
    task = r0([1, 2], 1, schedule=Schedule(cosine()))
    with pytest.raises(ConfigError, match=r"hooks\.learning_rate"):
        train(task)
    assert weight(task) == 0
    assert train(r0([1, 2], 1, schedule=Schedule(cosine())), rate=LearningRate()).updates == 2


def test_a_parameter_of_nobody_is_refused() -> None:
    model, other = Scalar(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    started = watch("on_start", lambda task: None)
    with pytest.raises(PhaseloopError, match="criterion"):
        train(
            Task(
                model=model,
                criterion=mean_output,
                optimizer=optimizer,
                train=Data(numbers([1]), 1),
                phases=Phases(epochs=1),
            ),
            started=started,
        )
    assert started.seen == []


class Two(nn.Module):
    """a * x + b * x * x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.0))
        self.b = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x + self.b * x * x


class AddGroup(Hook):
    """Adds b to the optimizer at the start of epoch 2, unfreezing it if it was frozen."""

    def on_phase_start(self, task: Task) -> None:
        if task.phase.epoch == 2:
            b = task.bare_model.b.requires_grad_()
            task.optimizers["optimizer"].add_param_group({"params": [b], "lr": 0.5})


@pytest.mark.parametrize("frozen", [True, False])
def test_a_group_added_while_training_is_moved_like_the_others(frozen: bool) -> None:
    xs, epochs, clip = [1.0, 2.0, 3.0], 3, 0.7
    model = Two()
    model.b.requires_grad_(not frozen)
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD([model.a], lr=0.25, momentum=0.5)
    train(
        Task(
            model=model,
            criterion=mean_output,
            optimizer=optimizer,
            train=Data(numbers(xs), 1, shuffle=False),
            phases=Phases(epochs=epochs),
            gradients=Gradients(clip_norm=clip),
        ),
        add=AddGroup(),
    )

    other = torch.optim.SGD([by_hand.a], lr=0.25, momentum=0.5)
    moved = [by_hand.a]
    for epoch in range(1, epochs + 1):
        if epoch == 2:
            other.add_param_group({"params": [by_hand.b.requires_grad_()], "lr": 0.5})
            moved.append(by_hand.b)
        for x in xs:
            other.zero_grad()
            by_hand(torch.tensor([x])).mean().backward()
            torch.nn.utils.clip_grad_norm_(moved, clip)
            other.step()
    assert torch.equal(model.a, by_hand.a) and torch.equal(model.b, by_hand.b)
    assert model.a.grad is None and model.b.grad is None


def test_gradients_from_before_the_run_are_no_part_of_it() -> None:
    task = r0([1], 1)
    task.bare_model(torch.tensor(100.0)).backward()
    train(task)
    assert weight(task) == -1


class Rising:
    """A loss n * mean(output) at its n-th call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        self.calls += 1
        return self.calls * output.mean()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_criterion_that_is_no_module_keeps_its_state(tmp_path: Path) -> None:
    for epochs in (1, 2):
        criterion = Rising()
        task = r0([1, 1], 1, epochs=epochs, criterion=criterion, run=Run(dir=str(tmp_path)))
        train(task, checkpoint=Checkpoint())
    assert criterion.calls == 4
    assert weight(task) == -(1 + 2 + 3 + 4)


@pytest.mark.parametrize(
    ("loss", "targets", "outputs"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([0.3, 0.7])), torch.tensor([0, 1, 1]), 2),
        (nn.MSELoss(), torch.tensor([[0.1], [0.2], [0.3]]), 1),
    ],
)
def test_float64_with_a_criterion_s_own_tensors_and_with_float_targets(
    loss: nn.Module, targets: Tensor, outputs: int
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, outputs)
    by_hand, loss_by_hand = copy.deepcopy(model).double(), copy.deepcopy(loss).double()
    x = torch.tensor([[0.1], [0.2], [0.3]])
    train(
        Task(
            model=model,
            criterion=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train=Data(TensorData(x, targets), 3, shuffle=False),
            phases=Phases(epochs=2),
            precision="float64",
        )
    )
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = targets.double() if targets.is_floating_point() else targets
        loss_by_hand(by_hand(x.double()), wanted).backward()
        optimizer.step()
    assert model.weight.dtype == torch.float64
    assert torch.equal(model.weight, by_hand.weight) and torch.equal(model.bias, by_hand.bias)


# --- what is said ---


def test_a_scalar_cannot_be_called_like_a_row_s_position() -> None:
    class Record(Hook):
        def on_step(self, task: Task) -> None:
            task.record("update", 1.0)

    with pytest.raises(PhaseloopError, match="'update'"):
        train(r0([1], 1), record=Record())


@pytest.mark.parametrize("evaluating", [True, False])
def test_a_model_in_evaluation_mode_is_warned_of(
    evaluating: bool, caplog: pytest.LogCaptureFixture
) -> None:
    task = r0([1, 2], 1, epochs=2)
    task.bare_model.train(not evaluating)
    train(task)
    said = [record for record in caplog.records if "evaluation mode" in record.getMessage()]
    assert len(said) == int(evaluating)
    assert all(record.levelno == logging.WARNING for record in said)
