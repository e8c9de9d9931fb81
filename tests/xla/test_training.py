"""Training on XLA: what differs from other devices, and that everything else does not."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phaseloop import (
    ConfigError,
    Data,
    Gradients,
    Hook,
    ModelOptions,
    NonFiniteError,
    PhaseloopError,
    Single,
    Task,
    TensorData,
    TorchSchedule,
    Trainer,
    Xla,
    register_train_step,
)
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from phaseloop.engine.model_summary import summarize_task
from phaseloop.hooks.average import Average
from phaseloop.hooks.early_stop import EarlyStop
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.model_summary import ModelSummary
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.hooks.precise_bn import PreciseBN
from tests.rigs import equal, process, r1
from tests.rigs.pairs import Failed
from tests.rigs.probes import watch
from tests.xla.cases import results

CLOSE = 1e-5
"""Largest difference of float32 after some ten updates: sums in another order."""


def folder() -> Path:
    return Path(tempfile.mkdtemp()) / "run"


def train(place: Path | None, hooks: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """R1, with these hooks besides or in place of its own; how it ended, and the task."""
    task = r1.make_task(place, **{"backend": Xla(), **options})
    return Trainer(task, {**r1.make_hooks(), **(hooks or {})}).train(), task


def weights(task: Task) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in task.bare_model.state_dict().items()}


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


# --- onto the device ---


class Tied(nn.Module):
    """Two layers with one weight, two modules with one buffer, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.register_buffer("shared", torch.ones(4), persistent=False)
        self.second.register_buffer("shared", self.first.shared, persistent=False)
        self.recurrent = nn.LSTM(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x) * self.first.shared)
        out: Tensor = self.recurrent(x.unsqueeze(0))[0][0]
        return out


def moved() -> list[str]:
    """What is not as it was, after a run whose optimizer was made before it and has stepped."""
    Xla().setup()  # before the first backward of the process
    torch.manual_seed(0)
    model = Tied()
    before = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    first = {name: p.detach().clone() for name, p in before.items()}
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    _, task = train(folder(), model=model, optimizer=optimizer, epochs=1)
    _, other = train(
        folder(), model=twin, optimizer=twins_optimizer, epochs=1, backend=Single("cpu")
    )
    after = dict(model.named_parameters())
    checks = {
        "parameters are the same objects": all(after[n] is p for n, p in before.items()),
        "of the optimizer, too": all(
            p in set(after.values()) for g in optimizer.param_groups for p in g["params"]
        ),
        "weights are tied": model.first.weight is model.second.weight,
        "buffers are shared": model.first.shared is model.second.shared,
        "all is on the device": {t.device.type for t in [*after.values(), *model.buffers()]}
        == {"xla"},
        "the state too": all(
            value.device.type == "xla"
            for entry in optimizer.state.values()
            for value in entry.values()
            if value.dim()
        ),
        "it has moved": not torch.equal(
            first["first.weight"], after["first.weight"].detach().cpu()
        ),
        "as on the CPU": apart(weights(task), weights(other)) < CLOSE,
    }
    saved = store.load(equal.newest(Path(str(task.folder.path))), MODEL)  # type: ignore[union-attr]
    tied = saved["first.weight"].data_ptr() == saved["second.weight"].data_ptr()
    checks["one tensor in the checkpoint"] = tied
    return [what for what, fine in checks.items() if not fine]


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.scale, target)


def criterion() -> float:
    """How far a criterion's parameter is from that of a run on the CPU."""
    ends = []
    for backend in (Xla(), Single("cpu")):
        model, loss = r1.network(), Scaled()
        model[2] = nn.Identity()
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
        train(None, model=model, criterion=loss, optimizer=optimizer, epochs=1, backend=backend)
        ends.append({"scale": loss.scale.detach().cpu()})
    assert not torch.equal(ends[0]["scale"], torch.ones(2))
    return apart(*ends)


# --- the arithmetic of an update ---


@register_train_step("of_tests.weighted")
def weighted(task: Task) -> None:
    """A mean over some of the samples, whose number is known to the device alone."""
    batch = task.next_batch()
    output = task.forward(batch.input)
    counts = (batch.target == 0).to(output.dtype)
    each = nn.functional.cross_entropy(output, batch.target, reduction="none")
    number = counts.sum()
    loss = (each * counts).sum() / number.clamp(min=1)
    task.measure(loss, output, batch.target, weight=number)
    if task.train:
        task.backward(loss, weight=number)
        task.update()


def some_left_out(samples: list[dict[str, Any]]) -> Any:
    """Nothing of a micro-batch that has sample 7 in it."""
    if any(sample["index"] == 7 for sample in samples):
        return None
    return torch.utils.data.default_collate(samples)


UPDATES: dict[str, dict[str, Any]] = {
    "weights from the step": {"train_step": "of_tests.weighted", "data": {"accumulate": 2}},
    "a micro-batch left out": {"data": {"accumulate": 2, "collate": some_left_out}},
    "clipped": {"gradients": Gradients(clip_norm=0.1, clip_value=0.05)},
    "clipped by the largest": {"gradients": Gradients(clip_norm=0.01, norm_type=float("inf"))},
    "frozen": {"freeze": ["0.weight"]},
}


def update(case: str) -> float:
    """How far the weights are from those of the same run on the CPU."""
    ends = []
    for backend in (Xla(), Single("cpu")):
        options = dict(UPDATES[case])
        model = r1.network()
        model[2] = nn.Identity()
        _, task = train(None, model=model, epochs=1, backend=backend, **options)
        ends.append(weights(task))
    return apart(*ends)


class Norms(nn.Module):
    """Each kind of norm that moves statistics, in front of a layer."""

    def __init__(self) -> None:
        super().__init__()
        instance = {"track_running_stats": True, "momentum": 0.5}
        self.batch = nn.BatchNorm1d(3, momentum=0.5)
        self.mean = nn.BatchNorm1d(3, momentum=None)
        self.instance = nn.InstanceNorm1d(3, **instance)
        self.still = nn.InstanceNorm1d(3, track_running_stats=True, momentum=None)
        self.image = nn.InstanceNorm2d(3, **instance)
        self.alone = nn.InstanceNorm1d(3, **instance)
        self.last = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        for norm in (self.batch, self.mean, self.instance, self.still):
            norm(x)
        self.image(x.reshape(-1, 3, 2, 2))
        self.alone(x[0])
        out: Tensor = self.last(x.flatten(1))
        return out


def norms() -> dict[str, float]:
    """By buffer, how far it is from that of the same run on the CPU, after two updates."""
    x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    ends = []
    for backend in (Xla(), Single("cpu")):
        torch.manual_seed(0)
        data = Data(TensorData(x, torch.arange(8) % 2), 4)
        _, task = train(None, model=Norms(), train=data, epochs=1, backend=backend)
        ends.append(weights(task))
    return {name: apart({name: ends[0][name]}, {name: ends[1][name]}) for name in ends[0]}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.conv(x)).flatten(1))
        return out


def counted() -> list[Any]:
    """The summary of a model at the start of its run, on XLA and on the CPU."""
    data = Data(TensorData(torch.ones(4, 1, 4, 4), torch.zeros(4, dtype=torch.long)), 4)
    found = []
    for backend in (Xla(), Single("cpu")):
        look = watch("on_start", summarize_task)
        train(None, {"look": look}, model=Convolutions(), train=data, epochs=1, backend=backend)
        found.append(look.seen[0])
    return found


# --- decisions ---


class Spoiled(r1.Samples):
    """Sample 9 is not a number."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "input": sample["input"] * float("nan")} if index == 9 else sample


def not_finite(policy: str) -> Any:
    """The text of the error, or the reasons for which updates were skipped and the rows' end."""
    place = folder()
    data = Data(Spoiled(), 4)
    hooks = {
        "non_finite": NonFinite(
            policy=policy, **({"most_roll_backs": 1} if policy == "roll_back" else {})
        )
    }
    try:
        outcome, _ = train(place, hooks, train=data, epochs=1, run={"log_every": 5})
    except NonFiniteError as error:
        return str(error)
    skips = [row for row in equal.rows(place) if row.get("event") == "skip"]
    return outcome.updates, [row["reason"] for row in skips]


def early_stop() -> tuple[str, bool]:
    """Why it stopped, and whether as a run on the CPU did, at the same update."""
    ends = []
    for backend in (Xla(), Single("cpu")):
        hooks = {"early_stop": EarlyStop(metric="test/loss", patience=1, min_delta=0.2)}
        model = r1.network()
        model[2] = nn.Identity()
        outcome, _ = train(folder(), hooks, model=model, test=True, epochs=9, backend=backend)
        ends.append((outcome.updates, outcome.reason))
    return ends[0][1], ends[0] == ends[1]


def plateau() -> list[float]:
    """The rates of the epochs."""
    schedule = TorchSchedule(
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=9.0),
        metric="test/loss",
    )
    place = folder()
    train(place, test=True, epochs=3, schedule=schedule)
    rows = [row for row in equal.rows(place) if row["phase"] == "train" and "lr" in row]
    return [row["lr"] for row in rows[::10]]


def best() -> bool:
    """Whether the checkpoint of the best test is kept and is the one that was best."""
    place = folder()
    task = r1.make_task(place, backend=Xla(), test=True, epochs=3)
    hooks = r1.make_hooks(save={"keep_best": 1, "metric": "test/loss"})
    outcome = Trainer(task, hooks).train()
    (entry,) = hooks["checkpoint"].best  # type: ignore[attr-defined]
    return entry[0] == outcome.best["test/loss"] and (place / "checkpoints" / entry[3]).is_dir()


def stopped_by_signal() -> tuple[str, int | None, int]:
    at = r1.At("on_step", 7, signal.SIGTERM)
    place = folder()
    outcome, _ = train(place, {"at": at})
    state = equal.state_of(equal.newest(place))
    return outcome.status, outcome.signal, state["progress"]["updates"]


# --- data ---


class Broken(r1.Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9:
            raise LookupError("sample 9 is nowhere")
        return super().__getitem__(index)


def broken_data(workers: int) -> str:
    try:
        train(folder(), train=Data(Broken(), 4, workers=workers), epochs=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}: {error.__cause__}"
    return "no error"


_moved: list[str] = []


def by_hand(data: Any, device: torch.device) -> Any:
    _moved.append(device.type)
    return {key: value.to(device) for key, value in data.items()}


def to_device() -> tuple[set[str], int]:
    outcome, _ = train(None, train=Data(r1.Samples(), 4, to_device=by_hand), epochs=1)
    return set(_moved), outcome.updates


# --- the generator ---


def with_and_without_tests() -> bool:
    """Whether dropout draws the same however often a test draws, which has dropout too.

    And however often what was noted down is run.
    """
    ends = []
    for test, hooks in ((True, {}), (False, {}), (False, {"marks": Marks()})):
        model = nn.Sequential(r1.network(), AlwaysDropout())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, task = train(None, hooks, model=model, optimizer=optimizer, test=test, epochs=2)
        ends.append(weights(task))
    return all(torch.equal(end[name], ends[0][name]) for end in ends[1:] for name in end)


class Marks(Hook):
    def on_step(self, task: Task) -> None:
        task.backend.mark_step()


class AlwaysDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.2, training=True)


def seeds() -> tuple[bool, bool]:
    """Whether one seed gives one training, and another seed another."""
    ends = [weights(train(None, seed=seed, epochs=1)[1]) for seed in (3, 3, 4)]
    same = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    return same, apart(ends[0], ends[2]) > 1e-3


# --- hooks that look at the model ---


class Norm(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def looked_at() -> dict[str, Any]:
    """With averages, precise batch norms and a summary: how far from the CPU, by metric."""
    ends = []
    for backend in (Xla(), Single("cpu")):
        model = Norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hooks = {
            "average": Average("ema", decay=0.7),
            "precise_bn": PreciseBN(batches=5),
            "model_summary": ModelSummary(),
        }
        outcome, task = train(
            None, hooks, model=model, optimizer=optimizer, test=True, epochs=2, backend=backend
        )
        ends.append((dict(outcome.final), weights(task)))
    metrics = {name: abs(value - ends[1][0][name]) for name, value in ends[0][0].items()}
    return {**metrics, "weights": apart(ends[0][1], ends[1][1])}


# --- checkpoints ---


def elsewhere() -> list[str]:
    """Tensors in a checkpoint that are not on the CPU."""
    place = folder()
    task = r1.make_task(place, backend=Xla(), optimizer_name="adam", epochs=1, test=True)
    Trainer(task, {**r1.make_hooks(), "average": Average("ema"), "keeps": KeepsParameter()}).train()
    saved = equal.newest(place)
    found: list[str] = []

    def look(value: Any, path: str) -> None:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            found.append(path)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                look(item, f"{path}.{key}")
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                look(item, f"{path}.{number}")

    for part in (MODEL, STATE):
        look(torch.load(saved.path / part, weights_only=True), part)
    kept = torch.load(saved.path / STATE, weights_only=True)["hooks"]["keeps"]["parameter"]
    if type(kept) is not nn.Parameter:
        found.append(f"a parameter has become a {type(kept).__name__}")
    return found


class KeepsParameter(r1.Counter):
    """A hook with a parameter of the model in its state."""

    def on_start(self, task: Task) -> None:
        self.parameter = next(task.bare_model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "parameter": self.parameter}


# --- what is refused ---


def refused(what: str) -> str:
    environment = dict(os.environ)
    try:
        if what == "device":
            Xla("cuda")
        elif what == "torchrun":
            os.environ.update(
                RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
            )  # fmt: skip
            train(None, epochs=1)
        elif what == "torch.distributed":
            dist.init_process_group("fake", rank=0, world_size=2, store=_fake())
            try:
                train(None, epochs=1)
            finally:
                dist.destroy_process_group()
        elif what == "float16":
            train(None, epochs=1, precision="float16")
        elif what == "compile":
            train(None, epochs=1, model_options=ModelOptions(compile=True))
        elif what == "fit_memory":
            train(None, {"fit_memory": FitMemory()}, epochs=1)
    except PhaseloopError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return "no error"


def _fake() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


REFUSED = {
    "device": ("backend.device", "'cuda' is not auto, cpu, tpu"),
    "torchrun": ("backend", "torchrun started this as one of 2 processes"),
    "torch.distributed": ("backend", "told of 2 processes, and XLA knows of 1"),
    "float16": ("precision", "use bfloat16"),
    "compile": ("model.compile", "leave it out"),
    "fit_memory": ("hooks.fit_memory", "data.train.micro_batch_size"),
}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "moved": (moved, {}),
    "criterion": (criterion, {}),
    **{f"update: {case}": (update, {"case": case}) for case in UPDATES},
    "norms": (norms, {}),
    "counted": (counted, {}),
    **{p: (not_finite, {"policy": p}) for p in ("stop", "skip", "roll_back")},
    "early stop": (early_stop, {}),
    "plateau": (plateau, {}),
    "best": (best, {}),
    "signal": (stopped_by_signal, {}),
    **{f"broken data, {n} workers": (broken_data, {"workers": n}) for n in (0, 1)},
    "to_device": (to_device, {}),
    "tests": (with_and_without_tests, {}),
    "seeds": (seeds, {}),
    "looked at": (looked_at, {}),
    "elsewhere": (elsewhere, {}),
    **{f"refused: {what}": (refused, {"what": what}) for what in REFUSED},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(zip(CASES, results(list(CASES.values())), strict=True))


def value(found: Mapping[str, Any], case: str) -> Any:
    came = found[case]
    assert not isinstance(came, Failed), came
    return came


def test_parameters_keep_their_identity_and_their_ties(found: dict[str, Any]) -> None:
    assert value(found, "moved") == []


def test_a_criterion_is_trained_too(found: dict[str, Any]) -> None:
    assert value(found, "criterion") < CLOSE


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_is_the_same_as_on_the_cpu(case: str, found: dict[str, Any]) -> None:
    assert value(found, f"update: {case}") < CLOSE


def test_running_statistics_are_those_of_the_cpu(found: dict[str, Any]) -> None:
    for name, distance in value(found, "norms").items():
        assert distance < CLOSE, name


def test_operations_are_counted_as_on_the_cpu(found: dict[str, Any]) -> None:
    there, here = value(found, "counted")
    assert there == here
    flops = {row.name: row.flops for row in there.rows}
    # Four places of a kernel of nine; and eight inputs to each of two outputs.
    assert flops["conv"] == 2 * 4 * 9 and flops["last"] == 8 * 2


def test_what_is_not_finite_is_found(found: dict[str, Any]) -> None:
    assert "the loss of update " in value(found, "stop")
    updates, reasons = value(found, "skip")
    assert updates == 9 and len(reasons) == 1
    assert "a gradient of 0.weight" in reasons[0] and "samples 28, 0, 14, 9" in reasons[0]
    assert "there is no checkpoint to roll back to" in value(found, "roll_back")


def test_decisions_are_those_of_any_device(found: dict[str, Any]) -> None:
    reason, same = value(found, "early stop")
    assert "test/loss" in reason and same
    assert value(found, "plateau") == pytest.approx([0.1, 0.01, 0.001])
    assert value(found, "best")


def test_a_signal_ends_it_saved(found: dict[str, Any]) -> None:
    assert value(found, "signal") == ("stopped", signal.SIGTERM, 7)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_reaches_the_user(workers: int, found: dict[str, Any]) -> None:
    assert "sample 9 is nowhere" in value(found, f"broken data, {workers} workers")


def test_a_function_may_move_the_batches(found: dict[str, Any]) -> None:
    assert value(found, "to_device") == ({"xla"}, 10)


def test_draws_depend_on_the_seed_alone(found: dict[str, Any]) -> None:
    assert value(found, "tests") is True
    assert value(found, "seeds") == (True, True)


def test_hooks_that_look_at_the_model(found: dict[str, Any]) -> None:
    came = value(found, "looked at")
    assert "test/accuracy" in came
    assert max(came.values()) < CLOSE, came


def test_a_checkpoint_is_on_the_cpu(found: dict[str, Any]) -> None:
    assert value(found, "elsewhere") == []


def backward_first() -> str:
    torch.ones((), requires_grad=True).backward()
    try:
        train(None, epochs=1)
    except PhaseloopError as error:
        return str(error)
    return "no error"


def test_it_has_to_be_started_before_the_first_backward() -> None:
    assert "call torch_xla.device() before that" in str(process.result(backward_first))


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str, found: dict[str, Any]) -> None:
    key, said = REFUSED[what]
    came = value(found, f"refused: {what}")
    assert came.startswith(f"{ConfigError.__name__}: {key}: ") and said in came
