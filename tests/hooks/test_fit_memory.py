"""Hook ``fit_memory``: a broken attempt leaves no trace, and the smaller size is kept."""

from __future__ import annotations

import copy
import logging
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Accuracy,
    ConfigError,
    Data,
    Gradients,
    Hook,
    Phases,
    Stage,
    Task,
    TensorData,
    Trainer,
)
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.plan import BatchPlan
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs import equal, process, r1
from tests.rigs.probes import watch
from tests.rigs.r0 import train

BATCH = 10
UPDATES = r1.SAMPLES // BATCH
"""Updates in an epoch."""

CUT = 3
"""What 10 comes to by halving, 10, 5, 3, where no more than 4 fit; it does not divide 10."""


def short(text: str = "CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.") -> Exception:
    return torch.OutOfMemoryError(text)


class Net(nn.Module):
    """Moves statistics, draws, and then runs out of memory with more than ``limit`` samples.

    Args:
        where: ``forward`` or ``backward``.

    Attributes:
        limit: None: there is memory enough.
        tests_too: the limit holds in tests.
        tried: sizes that the model was called with in training.
    """

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
        )
        self.where = where
        self.limit: int | None = None
        self.tests_too = False
        self.tried: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tried.append(len(x))
        hidden = self.layers[0](x)
        output: Tensor = self.layers[1:](hidden)
        if self.limit is not None and len(x) > self.limit and (self.training or self.tests_too):
            if self.where == "forward":
                raise short()
            hidden.register_hook(_fail)  # the last layer has its gradients by then
        return output


def _fail(gradient: Tensor) -> None:
    raise short()


class From(Hook):
    """Does something to the task from an update on, or from a batch of the test after it."""

    order = 1  # before whoever measures

    def __init__(self, update: int, act: Callable[[Task], None], position: int | None = None):
        self.update = update
        self.act = act
        self.position = position
        self.done = False

    def on_start(self, task: Task) -> None:
        self._look(task)

    def on_step(self, task: Task) -> None:
        self._look(task)

    def _look(self, task: Task) -> None:
        position = None if task.train else task.phase.position
        if task.progress.updates >= self.update and position == self.position and not self.done:
            self.done = True
            self.act(task)


def full(task: Task) -> None:
    """No more than 4 samples fit from now on."""
    task.bare_model.limit = 4


def cut(task: Task) -> None:
    """What a run that never breaks off does: cut the next batch smaller."""
    task.loaders[task.phase.name].cut_smaller(CUT)
    task.drop_batches()


def make(model: nn.Module | None = None, **options: Any) -> Task:
    """40 samples, each augmented, in batches of 10, for 2 epochs."""
    data = {"batch_size": BATCH, **options.pop("data", {})}
    settings: dict[str, Any] = {
        "model": Net() if model is None else model,
        "train": Data(r1.Samples(augment=True), **data),
        "epochs": 2,
        "run": {"log_every": 3},
    }
    return r1.make_task(None, **{**settings, **options})


class Seen(Hook):
    """What everyone may see of a run: rows, losses, metrics, draws."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, task: Task) -> None:
        if task.accumulator.closed:
            self.seen.append([task.phase.name, task.loss, task.output, r1.draws()])
            if task.recorder.due:
                row = task.recorder.row()
                self.seen.append({k: v for k, v in row.items() if k != "time"})

    def on_phase_end(self, task: Task) -> None:
        self.seen.append(dict(task.phase.metrics))


def run(task: Task, **hooks: Hook) -> dict[str, Any]:
    """Train; everything that the run has made, for :func:`same`."""
    seen = Seen()
    standard = r1.make_hooks()
    for name in ("checkpoint", "metrics_file"):
        del standard[name]
    train(task, **standard, **hooks, seen=seen)
    (optimizer,) = task.optimizers.values()
    progress = task.progress.state_dict()
    return {
        "model": task.bare_model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "meters": {name: meters.state_dict() for name, meters in task.meter_sets.items()},
        "recorder": task.recorder.state_dict(),
        "progress": progress,
        "carry": task.carry,
        "seen": seen.seen,
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    found = list(equal.differ("run", a, b))
    assert not found, "\n".join(found)


# --- the redone update ---


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_run_is_one_that_had_the_small_size_from_that_batch_on(
    where: str, workers: int
) -> None:
    broken = make(Net(where), data={"workers": workers})
    fit = FitMemory()
    # In the middle of an epoch, and of what is logged as one row.
    result = run(broken, fit=fit, full=From(5, full))
    whole = make(Net(where), data={"workers": workers})
    same(run(whole, cut=From(5, cut)), result)
    assert fit.sizes == {"data.train": CUT}
    pieces = [3, 3, 2, 2]
    assert whole.bare_model.tried == [BATCH] * 5 + pieces * 3
    assert broken.bare_model.tried == [BATCH] * 5 + [BATCH, 5] + pieces * 3
    assert broken.progress.steps == 5 + 4 * 3


def test_memory_that_is_gone_after_a_part_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Net):
        """Runs out at the second micro-batch of the third update."""

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if len(self.tried) == 6 and len(x) == 5:
                raise short()
            return output

    sets = {"data": {"accumulate": 2}}
    broken = make(Late(), **sets)
    # Gradients, statistics, meters and draws of the first micro-batch count for nothing.
    result = run(broken, fit=FitMemory())
    same(run(make(Net(), **sets), cut=From(2, cut)), result)
    assert broken.bare_model.tried[:10] == [5] * 6 + [3, 3, 2, 2]
    (line,) = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert line == (
        "out of memory at update 3 with micro-batches of 5: now 3; "
        "set data.train.micro_batch_size=3 in place of accumulate to start so"
    )


@pytest.mark.parametrize("data", [{}, {"accumulate": 2}, {"micro_batch_size": 7}], ids=str)
def test_the_mathematics_stays_the_same(data: dict[str, Any]) -> None:
    def linear(**more: Any) -> dict[str, Tensor]:
        model = Net()
        model.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        task = make(model, precision="float64", data=more.pop("data"))
        train(task, **more)
        return dict(model.state_dict())

    with_hook = linear(data=data, fit=FitMemory(), full=From(0, full))
    small = linear(data={"micro_batch_size": 3})
    uncut = linear(data={})
    for name, value in with_hook.items():
        torch.testing.assert_close(value, small[name], rtol=0, atol=1e-12)
        torch.testing.assert_close(value, uncut[name], rtol=0, atol=1e-12)


def test_every_kind_of_state_comes_back() -> None:
    class Odd(Net):
        """Buffers that are replaced, made late, and share memory; parameters nobody trains."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("wide", torch.zeros(1).expand(3))
            self.register_buffer("none", None)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.5 * self.mean + x.detach().mean()
            if self.none is None:
                self.none = x.detach().mean()
            if not hasattr(self, "late"):
                self.register_buffer("late", x.detach().mean() + self.wide[0])
            return super().forward(x)

    class Step:
        count = 0

        def __call__(self, task: Task) -> None:
            self.count += 1
            if task.carry is None:
                task.carry = {"sum": torch.zeros(()), "list": []}
            batch = task.next_batch()
            task.carry["sum"] += batch.input.sum()
            task.carry["list"].append(batch.size)
            task.record("count", self.count)
            task.recorder.gauge("sum", float(task.carry["sum"]))
            task.backward(task.criterion(task.forward(batch.input), batch.target))
            task.update()

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.seen += 1
            return nn.functional.cross_entropy(output, target) + 0.1 * self.seen

    def one(update: int, **hooks: Hook) -> dict[str, Any]:
        model, step, loss = Odd(), Step(), Loss()
        task = make(model, train_step=step, criterion=loss)
        result = run(task, **hooks)
        return {**result, "count": step.count, "calls": model.calls, "criterion": loss.seen}

    for update in (0, 5):
        same(one(update, cut=From(update, cut)), one(update, f=FitMemory(), x=From(update, full)))


@pytest.mark.parametrize(
    ("norm", "frozen", "warns"),
    [
        (nn.BatchNorm1d(4), [], True),
        (nn.BatchNorm1d(4), ["0"], False),
        (nn.BatchNorm1d(4).eval(), [], False),
        (nn.LayerNorm(4), [], False),
    ],
    ids=["batch norm", "frozen", "at rest", "layer norm"],
)
def test_batch_norms_are_said_to_see_fewer_samples(
    norm: nn.Module, frozen: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(norm, nn.Linear(4, 2))
    train(make(copy.deepcopy(model), epochs=1, freeze=frozen), fit=FitMemory())
    said = [r for r in caplog.records if "batch norms" in r.getMessage()]
    assert len(said) == warns
    assert all(r.levelname == "WARNING" and "hooks.fit" in r.getMessage() for r in said)


def test_a_model_without_buffers() -> None:
    def plain() -> Task:
        model = Net()
        model.layers = r1.network()
        return make(model)

    same(run(plain(), cut=From(5, cut)), run(plain(), fit=FitMemory(), full=From(5, full)))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("takes", ["micro_batch", "window"])
def test_the_broken_attempt_is_gone_when_memory_is_given_back(where: str, takes: str) -> None:
    held: list[Any] = []
    left: list[Any] = []

    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:
            try:
                output = super().forward(x)
            except RuntimeError as error:
                circle = [error]  # the error's own frame holds it
                assert circle
                held.append(weakref.ref(x))
                raise
            held.extend([weakref.ref(x), weakref.ref(output)])
            return output

    def step(task: Task) -> None:
        for batch in task.window() if takes == "window" else [task.next_batch()]:
            task.backward(task.criterion(task.forward(batch.input), batch.target))
        task.update()

    step.takes = takes  # type: ignore[attr-defined]

    def look() -> None:
        left.append([name for name, p in model.named_parameters() if p.grad is not None])
        left.append([n for n, reference in enumerate(held) if reference() is not None])

    model = Watched(where)
    task = make(model, train_step=step, phases={"updates": 1}, epochs=None)
    task.backend.free_memory = look  # type: ignore[method-assign]
    train(task, fit=FitMemory(), full=From(0, full))
    assert left == [[], []] * 2  # after 10 and after 5 samples


def test_a_first_piece_without_a_batch() -> None:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack([sample["input"] for sample in samples])
        y = torch.stack([sample["target"] for sample in samples])
        return None if len(x) <= 3 and int(y.sum()) % 2 else (x, y)

    options = {"data": {"collate": collate, "shuffle": False}}
    probe = watch("on_step", lambda task: task.step_is_empty)
    result = run(make(**options), fit=FitMemory(), full=From(1, full), probe=probe)
    assert True in probe.seen
    same(run(make(**options), cut=From(1, cut)), result)


def test_sizes_by_epoch_and_steps_of_another_stage() -> None:
    def step(task: Task) -> None:
        batch = task.next_batch()
        task.backward(task.criterion(task.forward(batch.input), batch.target))
        task.update()

    sizes: list[int] = []
    task = make(
        data={"batch_size": {1: 4, 2: 10}},
        phases=[Stage(name="one", epochs=2), Stage(name="two", epochs=1, train_step=step)],
    )
    task.bare_model.limit = 4
    train(task, fit=FitMemory(), probe=watch("on_forward", lambda t: sizes.append(t.batch.size)))
    assert sizes == [4] * 10 + [3, 3, 2, 2] * UPDATES * 2

    task = make(
        data={"micro_batch_size": 4},
        phases=[Stage(name="one", epochs=1), Stage(name="two", epochs=1, train_step=step)],
    )
    sizes.clear()
    fit, full_at = FitMemory(), From(UPDATES, lambda t: setattr(t.bare_model, "limit", 2))
    train(task, fit=fit, x=full_at, probe=watch("on_forward", lambda t: sizes.append(t.batch.size)))
    assert sizes == [4, 3, 3] * UPDATES + [2] * 5 * UPDATES
    assert fit.sizes == {"data.train": 2}


def test_a_plan_with_a_largest_micro_batch() -> None:
    def pieces(**options: Any) -> list[int]:
        window = BatchPlan(samples=10, batch_size=10, **options).window(0)
        return [piece.stop - piece.start for piece in window.pieces]

    assert pieces(largest=4) == [4, 3, 3]
    assert pieces(largest=4, micro_batch_size=2) == [2] * 5
    assert pieces(largest=2, accumulate=2) == [2] * 5
    assert pieces(largest=9, accumulate=2) == [5, 5]
    assert pieces(largest=10) == [10]


# --- steps that take windows; what comes after the last backward ---


def test_a_step_that_takes_windows() -> None:
    def step(task: Task) -> None:
        for _ in range(2):  # a first pass whose gradients are given up
            for parameter in task.bare_model.parameters():
                parameter.grad = None
            for batch in task.window():
                task.backward(task.criterion(task.forward(batch.input), batch.target))
        task.update()

    step.takes = "window"  # type: ignore[attr-defined]
    result = run(make(train_step=step), fit=FitMemory(), full=From(5, full))
    same(run(make(train_step=step), cut=From(5, cut)), result)


class BreakInHook(Hook):
    """Out of memory where the update's gradients are whole."""

    order = 30

    def on_gradients(self, task: Task) -> None:
        if task.progress.updates >= 5 and task.accumulator.window.pieces[0].weight > 4:
            raise short()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_after_the_last_backward(precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "gradients": Gradients(clip_norm=0.1)}

    def scaled(**hooks: Hook) -> dict[str, Any]:
        task = make(**options)
        result = run(task, **hooks)
        scaler = task.precision.scaler
        return {**result, "scaler": {} if scaler is None else scaler.state_dict()}

    same(scaled(cut=From(5, cut)), scaled(fit=FitMemory(), broken=BreakInHook()))


class Adam(torch.optim.Adam):
    """Runs out of memory while it makes its state, or later."""

    after = 0
    moves = False

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        if self.tell() > 4 and self.made >= self.after:
            if self.moves:
                self.state[group["params"][0]]["exp_avg"].add_(1)
            elif not self.state:
                self.state[group["params"][0]] = {"step": torch.tensor(0.0)}
            raise short()
        self.made += 1
        return super().step(closure)


def _adam(task_of: list[Task], after: int, moves: bool = False) -> Callable[[nn.Module], Adam]:
    def build(model: nn.Module) -> Adam:
        optimizer = Adam(model.parameters(), lr=0.01)
        optimizer.after, optimizer.moves, optimizer.made = after, moves, 0
        optimizer.tell = lambda: task_of[0].accumulator.window.pieces[0].weight
        return optimizer

    return build


@pytest.mark.parametrize("update", [0, 5])
def test_in_an_optimizers_step_before_anything_moved(update: int) -> None:
    holder: list[Task] = []
    holder.append(make(optimizer=_adam(holder, update)))
    result = run(holder[0], fit=FitMemory())
    (adam,) = holder[0].optimizers.values()
    assert not adam._optimizer_step_pre_hooks  # nobody watches it after the run
    other: list[Task] = []
    other.append(make(optimizer=_adam(other, 99)))
    same(run(other[0], cut=From(update, cut)), result)


# --- what cannot be redone ---


def failure(task: Task, **hooks: Hook) -> str:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(task, **{"fit": FitMemory(), **hooks})
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    return str(raised.value)


TEXT = "(CUDA out of memory. Tried to allocate 2 GiB.)"


def test_an_optimizer_in_the_middle_of_its_step() -> None:
    holder: list[Task] = []
    holder.append(make(optimizer=_adam(holder, 5, moves=True)))
    assert failure(holder[0]) == (
        "out of memory at update 6 with micro-batches of 10: the update cannot be redone, since "
        "an optimizer was in the middle of its step; resume with data.train.micro_batch_size=5 "
        f"{TEXT}"
    )


def test_an_optimizer_that_has_stepped() -> None:
    def step(task: Task) -> None:
        for number in range(2):
            for batch in task.window():
                if number:
                    raise short()
                task.backward(task.criterion(task.forward(batch.input), batch.target))
            task.update()

    step.takes = "window"  # type: ignore[attr-defined]
    assert failure(make(train_step=step)) == (
        "out of memory at update 1 with micro-batches of 10: the update cannot be redone, since "
        f"optimizer has already stepped in it; resume with data.train.micro_batch_size=5 {TEXT}"
    )


def test_a_step_that_changes_parameters_itself() -> None:
    def step(task: Task) -> None:
        task.next_batch()
        with torch.no_grad():
            task.bare_model.layers[0].weight.mul_(0.9)
        raise short()

    assert "since the step itself has changed parameters" in failure(make(train_step=step))


def test_no_smaller_size() -> None:
    class Never(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise short()

    assert failure(make(Never(4, 2))) == (
        f"out of memory at update 1 with micro-batches of 1: there are no smaller ones {TEXT}"
    )
    assert failure(make(Never(4, 2)), fit=FitMemory(least=3)) == (
        "out of memory at update 1 with micro-batches of 3: hooks.fit.least=3 allows no smaller "
        f"ones {TEXT}"
    )


def test_other_errors_are_as_they_were() -> None:
    def step(task: Task) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side"):
        train(make(train_step=step), fit=FitMemory())


def test_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^hooks\.fit_memory\.least: 0 is less than 1"):
        FitMemory(least=0)
    with pytest.raises(ConfigError, match=r"^hooks\.fit_memory\.prove: 0 is less than 1"):
        FitMemory(prove=0)
    with pytest.raises(ConfigError, match=r"^hooks\.fit: the train step works on whole batches"):
        train(make(train_step="closure"), fit=FitMemory())
    stages = [Stage(name="one", epochs=1), Stage(name="two", epochs=1, train_step="closure")]
    with pytest.raises(ConfigError, match="the train step of stage two works on whole"):
        train(make(phases=stages), fit=FitMemory())
    with pytest.raises(ConfigError, match=r"^hooks\.again: there is another hook of this kind"):
        train(make(), fit=FitMemory(), again=FitMemory())


def test_a_batch_transform_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    train(make(data={"batch_transform": lambda batch: batch}), fit=FitMemory())
    assert "data.train.batch_transform mixes samples of one micro-batch" in caplog.text


# --- tests ---


def test_in_a_test_phase() -> None:
    model = Net()
    model.limit, model.tests_too = 4, True
    broken = _with_test(model)
    fit = FitMemory()
    result = run(broken, fit=fit)
    small = _with_test(Net(), micro_batch_size=CUT)
    same(run(small, cut=From(0, cut)), result)
    assert fit.sizes == {"data.train": CUT, "data.test": CUT}


def test_in_the_second_batch_of_a_test(caplog: pytest.LogCaptureFixture) -> None:
    def full_in_tests(task: Task) -> None:
        task.bare_model.limit, task.bare_model.tests_too = 4, True

    def enough(task: Task) -> None:
        task.bare_model.limit = None

    broken, fit = _with_test(Net()), FitMemory()
    result = run(broken, fit=fit, x=From(4, full_in_tests, 1), y=From(4, enough, 2))
    same(run(_with_test(Net()), cut=From(4, cut, 1)), result)
    assert fit.sizes == {"data.test": CUT}
    assert "out of memory in test at update 4 with micro-batches of 10: now 5" in caplog.text


def _with_test(model: Net, **options: Any) -> Task:
    """With a test of 21 samples in batches of 10, at the end of each epoch."""
    test = Data(r1.Samples(21, augment=True), BATCH, **options)
    data = Data(r1.Samples(augment=True), BATCH)
    return Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=r1.optimizer("sgd", model),
        train=data,
        test=test,
        phases=Phases(epochs=2),
        train_meters={"accuracy": Accuracy()},
        test_meters={"accuracy": Accuracy()},
    )


# --- what is told and kept ---


def test_an_event_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    model = Net()
    model.limit = 4
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(x, (x.sum(1) > 0).long()), 8),
        phases=Phases(epochs=1),
        run=r1.Run(dir=str(tmp_path)),
    )
    train(task, fit=FitMemory(), metrics_file=MetricsFile())
    (event,) = [row for row in equal.rows(tmp_path) if "event" in row]
    wanted = {"event": "fit_memory", "update": 1, "data": "data.train", "before": 8,
              "micro_batch_size": 4}  # fmt: skip
    assert {name: event[name] for name in wanted} == wanted
    line = (
        "out of memory at update 1 with micro-batches of 8: now 4; "
        "set data.train.micro_batch_size=4 to start so"
    )
    assert [r.getMessage() for r in caplog.records].count(line) == 1


def test_a_size_found_since_a_state_was_saved_stays_found() -> None:
    fit = FitMemory()
    fit.load_state_dict({"sizes": {"data.train": 4, "data.test": 8}})
    fit.load_state_dict({"sizes": {"data.train": 8, "data.test": 4}})
    assert fit.sizes == {"data.train": 4, "data.test": 4}


class RollBackAt(Hook):
    """Once, at the eighth update."""

    order = 20

    def on_gradients(self, task: Task) -> None:
        if task.progress.updates == 7 and not task.progress.roll_backs:
            task.roll_back("the test asked for it", 1)


def test_rolled_back_to_before_the_halving(tmp_path: Path) -> None:
    data = Data(r1.Samples(augment=True), BATCH)
    task = r1.make_task(tmp_path, model=Net(), epochs=3, train=data)
    fit, back = FitMemory(), RollBackAt()
    hooks = r1.make_hooks(save={"every_updates": 5}, fit=fit, back=back, full=From(5, full))
    Trainer(task, hooks).train()
    assert fit.sizes == {"data.train": CUT}
    wide = UPDATES + 1
    # Updates 6 to 8, then 6 to 12 anew: the size found is not looked for again.
    assert task.bare_model.tried == [BATCH] * wide + [BATCH, 5] + [3, 3, 2, 2] * (3 + 7)


def test_who_reads_beside_the_training_does_so_in_pieces_that_fit() -> None:
    data = Data(r1.Samples(), BATCH)
    data.open(0, "data.train")
    device = torch.device("cpu")
    loader = Loader(data, train=True, source=0, seed=0, device=device, key="data.train")
    loader.cut_smaller(CUT)
    other = loader.beside()
    assert (other.plan, other.key) == (loader.plan, "data.train")
    assert other.plan.largest == CUT


@pytest.mark.parametrize(
    ("kill", "options"),
    [
        (5, {}),
        (13, {}),  # after the halving, and before it was saved
        (18, {}),
        (18, {"workers": 2, "augment": True}),
    ],
    ids=str,
)
def test_killed_and_resumed(tmp_path: Path, kill: int, options: dict[str, Any]) -> None:
    def hooks(**more: Hook) -> dict[str, Hook]:
        return {"fit": FitMemory(), "full": From(12, _two_fit), **more}

    everything = {"model": Net(), "test": True, **options}
    reference = tmp_path / "reference"
    process.result(r1.train, reference, equal.probe_of(reference), hooks=hooks(), **everything)
    folder = tmp_path / "run"
    at = r1.At("on_step", kill)
    save = {"every_updates": 7}
    ended = process.run(
        r1.train, folder, equal.probe_of(folder), hooks=hooks(at=at), save=save, **everything
    )
    assert ended.code == -signal.SIGKILL
    ended = process.run(
        r1.train, folder, equal.probe_of(folder), hooks=hooks(), save=save, **everything
    )
    assert ended.code == 0, ended.output
    assert ("out of memory" in ended.output) == (kill < 14)
    equal.assert_eq(reference, folder)
    assert equal.state_of(equal.newest(folder))["hooks"]["fit"] == {"sizes": {"data.train": 2}}
    events = [row for row in equal.rows(folder) if "event" in row]
    assert len(events) == 1


def _two_fit(task: Task) -> None:
    task.bare_model.limit = 2
