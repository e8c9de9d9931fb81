"""AMP: half precision, and losses that are scaled for it."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    ConfigError,
    Data,
    Gradients,
    LossScale,
    Phases,
    Precision,
    Schedule,
    Task,
    TensorData,
)
from phaseloop.engine.schedules import linear
from phaseloop.hooks.average import Average
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.non_finite import NonFinite
from tests.rigs import equal, process, r1
from tests.rigs.equal import assert_eq, probe_of, undisturbed
from tests.rigs.probes import RecordingSGD, watch
from tests.rigs.r0 import pair, r0, train, weight
from tests.rigs.r1 import At

HALF = Precision("float16", LossScale(initial=1024, growth_interval=4))


def scaled(initial: float = 1024, growth_interval: int = 1000) -> Precision:
    return Precision("float16", LossScale(initial=initial, growth_interval=growth_interval))


def scale_of(task: Task) -> tuple[float, int]:
    """The loss scale, and the updates without overflow since it moved."""
    assert task.precision.scaler is not None
    state = task.precision.scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


def test_amp_a_an_overflow_is_a_skip_and_moves_nothing() -> None:
    """x = 1, 1, inf, 1, 1, 1: the gradient of the third is infinite."""
    task = r0(
        [1, 1, math.inf, 1, 1, 1], 1, optimizer=RecordingSGD, precision=scaled(),
        schedule=Schedule(linear(start=1.0, end=1.0)),
    )  # fmt: skip
    updates = watch("on_update", lambda t: t.progress.updates)
    events = watch("on_step", lambda t: list(t.recorder.events))
    average = Average(kind="swa", every_updates=1)
    outcome = train(
        task, learning_rate=LearningRate(), updates=updates, events=events, average=average
    )
    assert outcome.updates == 5
    assert weight(task) == -5
    assert task.progress.moved == {"optimizer": 5}  # what schedules are functions of
    assert updates.seen == [0, 1, 2, 3, 4]
    assert average.samples == 5
    assert float(task.averages["average"]["w"]) == -(1 + 2 + 3 + 4 + 5) / 5
    assert scale_of(task)[0] == 512
    assert [found for found in events.seen if found] == [
        [{"event": "skip", "update": 3, "reason": "gradients overflowed at loss scale 1024"}]
    ]


def test_amp_a_the_policy_stop_does_not_take_an_overflow_for_a_fault() -> None:
    """1e4 times 2**115 is more than float32 holds, times 2**114 is not: no NaN of the training."""
    assert 1e4 * 2.0**114 < torch.finfo(torch.float32).max < 1e4 * 2.0**115
    task = r0([1e4] * 3, 1, precision=scaled(initial=2.0**115))
    assert train(task, non_finite=NonFinite()).updates == 2


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_amp_b_gradients_are_clipped_as_they_are(clip: float) -> None:
    task = r0([10], 1, precision=scaled(), gradients=Gradients(clip_norm=clip))
    norm = watch("on_update", lambda t: float(t.gradient_norm))
    train(task, norm=norm)
    assert weight(task) == pytest.approx(-clip, abs=1e-5)
    assert norm.seen == [10.0]


def test_amp_hooks_see_unscaled_gradients() -> None:
    task = r0([3], 1, precision=scaled())
    seen = watch("on_gradients", lambda t: float(t.trainable[0].grad))
    train(task, seen=seen)
    assert seen.seen == [3.0]


def test_amp_a_window_is_unscaled_once() -> None:
    task = r0([1, 2, 3, 6], 4, precision=scaled(), data={"micro_batch_size": 1})
    train(task)
    assert weight(task) == -3


def test_amp_the_forward_is_in_half_precision_and_the_loss_is_not() -> None:
    kinds: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            kinds.append(output.dtype)
            return output

    model = Watched(4, 2)
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(torch.randn(4, 4), torch.zeros(4, dtype=torch.long)), 4),
        phases=Phases(epochs=1),
        precision=scaled(),
    )
    losses = watch("on_loss_and_meter", lambda t: t.loss.dtype)
    train(task, losses=losses)
    assert kinds == [torch.float16]
    assert losses.seen == [torch.float32]
    assert model.weight.dtype == torch.float32


def test_amp_the_scale_moves_once_an_update_however_often_an_optimizer_steps() -> None:
    """Three pieces a batch, four batches, growth interval 4: the scale has doubled once."""
    from phaseloop.train_steps import TruncatedBackpropagation

    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
            return self.w * x, None

    model = Echo()
    x = torch.ones(4, 3)
    task = Task(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(x, x), 1),
        train_step=TruncatedBackpropagation(1),
        phases=Phases(epochs=1),
        precision=scaled(growth_interval=4),
    )
    assert train(task).updates == 4
    assert scale_of(task) == (2048, 0)


def pair_task(**options: Any) -> Task:
    """a sees 1 and inf, b sees 1 and 1."""
    return pair([(1, 1), (math.inf, 1)], precision=scaled(), **options)


def test_amp_two_optimizers_overflow_one_by_one() -> None:
    """b moves twice, a once; the scale falls once."""
    task = pair_task()
    model = task.bare_model
    events = watch("on_step", lambda t: list(t.recorder.events))
    assert train(task, events=events).updates == 2
    assert (model.a.item(), model.b.item()) == (-1, -2)
    assert task.progress.moved == {"a": 1, "b": 2}
    assert scale_of(task)[0] == 512
    assert events.seen[1] == [
        {"event": "skip", "update": 2, "reason": "gradients overflowed at loss scale 1024",
         "optimizer": "a"}
    ]  # fmt: skip


@pytest.mark.parametrize("clip", [{"clip_value": 0.5}, {"clip_norm": 0.5}])
def test_amp_what_has_overflowed_is_not_clipped(clip: dict[str, float]) -> None:
    """It has no gradients any more; b's are 1, twice, and are clipped to a half."""
    task = pair_task(gradients=Gradients(**clip))
    assert train(task).updates == 2
    model = task.bare_model
    assert (model.a.item(), model.b.item()) == pytest.approx((-0.5, -1), abs=1e-5)


def test_amp_what_has_overflowed_is_no_fault_of_the_others() -> None:
    """The policy skip looks at what is used: b moves, though a's gradients are infinite."""
    task = pair_task()
    train(task, non_finite=NonFinite("skip"))
    model = task.bare_model
    assert (model.a.item(), model.b.item()) == (-1, -2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision("half"), "precision: 'half' is not one of"),
        (lambda: Precision("float32", LossScale()), "precision.loss_scale: only float16 needs it"),
        (lambda: scaled(initial=0), "precision.loss_scale.initial: 0 is not more than 0"),
        (lambda: scaled(growth_interval=0), "precision.loss_scale.growth_interval: 0 is not"),
    ],
)
def test_amp_what_cannot_be_is_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# --- RES-j ---


def test_res_j_the_scale_grows_and_its_count_is_resumed(tmp_path: Path) -> None:
    """Initial scale 1024, growth interval 4: it doubles after updates 4 and 8."""
    scales = watch("on_step", scale_of)
    train(r1.make_task(None, epochs=1, precision=HALF), scales=scales)
    assert [scale for scale, _ in scales.seen[:8]] == [1024] * 3 + [2048] * 4 + [4096]

    options: dict[str, Any] = {"precision": HALF, "epochs": 1}
    folder = tmp_path / "run"
    ended = process.run(
        r1.train, folder, probe_of(folder), hooks={"at": At("on_step", 6, signal.SIGTERM)},
        **options,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    saved = equal.state_of(equal.newest(folder))["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (2048, 2)

    until_8 = {"at": At("on_step", 8, "stop")}
    process.result(r1.train, folder, probe_of(folder), hooks=until_8, **options)
    saved = equal.state_of(equal.newest(folder))["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (4096, 0)

    process.result(r1.train, folder, probe_of(folder), **options)
    assert_eq(undisturbed(**options), folder)


def test_res_j_another_loss_scale_is_another_training(tmp_path: Path) -> None:
    """The scale that a checkpoint holds would take the place of the one that was given."""
    train(r1.make_task(tmp_path, precision=scaled(initial=1024), epochs=1), save=Checkpoint())
    other = r1.make_task(tmp_path, precision=scaled(initial=2048), epochs=2)
    with pytest.raises(ConfigError, match=r"loss_scale\.initial: 1024 -> 2048"):
        train(other)
