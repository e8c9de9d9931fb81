"""Schedules: every curve against its formula, warm-up, joined curves, groups, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fvcore.common.param_scheduler import ConstantParamScheduler, LinearParamScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phaseloop import ConfigError, Schedule, Warmup
from phaseloop.engine import registry
from phaseloop.engine.epoch_lengths import EpochLengths
from phaseloop.engine.schedules import (
    Joined,
    Rates,
    ScaleWithBatch,
    Stretch,
    composite,
    constant,
    cosine,
    cosine_restarts,
    inverse_sqrt,
    linear,
    multi_step,
    step,
)
from phaseloop.hooks.learning_rate import LearningRate
from tests.rigs.probes import RecordingSGD
from tests.rigs.r0 import r0, train

BASE = 0.3
STRETCH = Stretch(updates=64, epochs=4)


def restarts(lengths: list[float], tops: list[float], where: float) -> float:
    """Half a cosine after the other, each from its top to 0.1."""
    for length, top in zip(lengths, tops, strict=True):
        if where < length:
            return 0.1 + (top - 0.1) * (1 + math.cos(math.pi * where / length)) / 2
        where -= length
    raise AssertionError(where)


# name, options, formula of where in [0, 1) for the base value 0.3
FORMULAS: list[tuple[str, dict[str, Any], Callable[[float], float]]] = [
    ("constant", {}, lambda w: BASE),
    ("linear", {}, lambda w: BASE * (1 - w)),
    ("linear", {"start": 0.1, "end": 0.5}, lambda w: 0.1 + 0.4 * w),
    ("cosine", {}, lambda w: BASE * (1 + math.cos(math.pi * w)) / 2),
    (
        "cosine",
        {"start": 0.2, "end": 0.1},
        lambda w: 0.1 + 0.1 * (1 + math.cos(math.pi * w)) / 2,
    ),
    (
        "multi_step",
        {"milestones": [0.25, 0.5]},
        lambda w: BASE * (1 if w < 0.25 else 0.1 if w < 0.5 else 0.01),
    ),
    (
        "multi_step",
        {"milestones": [0.5], "factors": [3.0]},
        lambda w: BASE * (1 if w < 0.5 else 3),
    ),
    (
        "multi_step",
        {"milestones": [0.25, 0.5], "gamma": 0.5},
        lambda w: BASE * (1 if w < 0.25 else 0.5 if w < 0.5 else 0.25),
    ),
    ("step", {"steps": 4}, lambda w: BASE * 0.1 ** math.floor(4 * w)),
    ("step", {"steps": 2, "gamma": 0.5}, lambda w: BASE * 0.5 ** math.floor(2 * w)),
    ("step", {"steps": 1}, lambda w: BASE),
    ("polynomial", {"power": 2.0}, lambda w: BASE * (1 - w) ** 2),
    ("polynomial", {"power": 0.5}, lambda w: BASE * math.sqrt(1 - w)),
    ("exponential", {"decay": 0.1}, lambda w: BASE * 0.1**w),
    ("step", {"every": 0.25}, lambda w: BASE * 0.1 ** math.floor(4 * w)),
    ("step", {"every": 1.5, "unit": "epochs"}, lambda w: BASE * 0.1 ** math.floor(4 * w / 1.5)),
    ("step", {"every": 24, "unit": "updates"}, lambda w: BASE * 0.1 ** math.floor(64 * w / 24)),
    (
        "multi_step",
        {"milestones": [1, 3], "unit": "epochs"},
        lambda w: BASE * (1 if w < 0.25 else 0.1 if w < 0.75 else 0.01),
    ),
    (
        "multi_step",
        {"milestones": [16, 48], "unit": "updates"},
        lambda w: BASE * (1 if w < 0.25 else 0.1 if w < 0.75 else 0.01),
    ),
    # Three cycles of 1, 2 and 4 parts of 7; the second begins 0.4 times as high above the end.
    (
        "cosine_restarts",
        {"cycles": 3, "growth": 2, "decay": 0.4, "end": 0.1},
        lambda w: restarts([1 / 7, 2 / 7, 4 / 7], [0.3, 0.1 + 0.4 * 0.2, 0.1 + 0.16 * 0.2], w),
    ),
    ("cosine_restarts", {"cycles": 2, "start": 1.0},
     lambda w: (1 + math.cos(math.pi * (2 * w % 1))) / 2),
    ("inverse_sqrt", {"length": 16}, lambda w: BASE * math.sqrt(16 / max(16, 64 * w))),
    ("inverse_sqrt", {"length": 2, "unit": "epochs"},
     lambda w: BASE * math.sqrt(2 / max(2, 4 * w))),
    ("inverse_sqrt", {"length": 0.25, "unit": "fraction"},
     lambda w: BASE * math.sqrt(1 / max(1, 4 * w))),
    (
        "composite",
        {"parts": [{"name": "linear", "start": 0.0, "end": 1.0}, {"name": "constant"}],
         "lengths": [1, None], "unit": "epochs"},
        lambda w: 4 * w if w < 0.25 else BASE,
    ),
    (
        "composite",
        {"parts": [{"name": "linear", "start": 0.0, "end": 1.0}, {"name": "constant"}],
         "lengths": [16, 48], "unit": "updates"},
        lambda w: 4 * w if w < 0.25 else BASE,
    ),
    # Milestones count from the training's start, inside a part as well.
    (
        "composite",
        {"parts": [{"name": "constant"},
                   {"name": "multi_step", "milestones": [3], "unit": "epochs"}],
         "lengths": [0.25, 0.75]},
        lambda w: BASE * (1 if w < 0.75 else 0.1),
    ),
    (
        "composite",
        {"parts": [{"name": "linear", "start": 0.0, "end": 1.0}, {"name": "constant"}],
         "lengths": [0.25, 0.75]},
        lambda w: 4 * w if w < 0.25 else BASE,
    ),
]  # fmt: skip
# Fractions of 64 are exact in binary: no border is missed by rounding here.
POSITIONS = [k / 64 for k in range(64)] + [0.999999]


def curve(name: str, **options: Any) -> Callable[[float], float]:
    return registry.schedules.get(name).target(**options)(BASE, STRETCH)


@pytest.mark.parametrize(("name", "options", "formula"), FORMULAS)
def test_a_curve_is_its_formula(
    name: str, options: dict[str, Any], formula: Callable[[float], float]
) -> None:
    made = curve(name, **options)
    expected = [formula(where) for where in POSITIONS]
    assert [made(where) for where in POSITIONS] == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_every_registered_curve_is_checked() -> None:
    ours = {e.name for e in registry.schedules if e.target.__module__.startswith("phaseloop.")}
    assert ours == {name for name, _, _ in FORMULAS}


@pytest.mark.parametrize("steps", [3, 7, 10, 30])
@pytest.mark.parametrize("epochs", [90, 100, 210])
def test_a_milestone_falls_on_its_update_whatever_the_rounding(steps: int, epochs: int) -> None:
    """Update k of N uses (k-1)/N; with N a multiple of the steps a part has N / steps updates."""
    n = steps * epochs
    made = step(steps, gamma=0.5)(1.0, STRETCH)
    values = [made(k / n) for k in range(n)]
    assert values == [0.5 ** (k // epochs) for k in range(n)]


# --- warm-up ---


def rates(schedule: Schedule, updates: int, epochs: float = 1) -> list[float]:
    """The values of a whole run."""
    schedule.plan(updates, epochs)
    return [schedule.value(BASE, k, math.floor(k * epochs / updates)) for k in range(updates)]


@pytest.mark.parametrize(
    "length", [{"updates": 4}, {"epochs": 2}, {"fraction": 0.4}], ids=lambda d: next(iter(d))
)
def test_warm_up_in_updates_epochs_and_a_fraction(length: dict[str, Any]) -> None:
    """4 of 10 updates, 2 of 5 epochs, two fifths."""
    warm = Schedule(cosine(), warmup=Warmup(0.1, **length))
    rise = [0.1 + (BASE - 0.1) * k / 4 for k in range(4)]
    rest = [BASE * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    assert rates(warm, 10, 5) == pytest.approx(rise + rest, rel=1e-12)


def test_warm_up_rises_to_where_the_curve_begins() -> None:
    """Which is not the base value where the curve has a start of its own."""
    warm = Schedule(composite([{"name": "linear", "start": 0.8}], [1.0]), warmup=Warmup(0, 5))
    assert rates(warm, 10)[:6] == pytest.approx([0.16 * k for k in range(5)] + [0.8], rel=1e-12)


def test_warm_up_of_no_length_is_none() -> None:
    for length in ({"updates": 0}, {"epochs": 0.0}, {"fraction": 0.0}):
        warm = Schedule(cosine(), warmup=Warmup(0.1, **length))
        assert rates(warm, 10) == rates(Schedule(cosine()), 10)


@pytest.mark.parametrize(
    ("length", "key"),
    [
        ({}, "schedule.warmup"),
        ({"updates": 1, "epochs": 1}, "schedule.warmup"),
        ({"updates": 10}, "schedule.warmup.updates"),
        ({"epochs": 5}, "schedule.warmup.epochs"),
        ({"fraction": 1.0}, "schedule.warmup.fraction"),
        ({"fraction": -0.1}, "schedule.warmup.fraction"),
    ],
)
def test_a_warm_up_that_cannot_be_is_an_error(length: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        rates(Schedule(cosine(), warmup=Warmup(0.1, **length)), 10, 5)
    assert error.value.key == key


@given(st.integers(2, 5000), st.data())
def test_the_first_update_after_the_warm_up_has_the_full_value(n: int, data: Any) -> None:
    warm_updates = data.draw(st.integers(1, n - 1))
    schedule = Schedule(constant(), warmup=Warmup(0.1, updates=warm_updates))
    schedule.plan(n, 1)
    assert schedule.value(BASE, warm_updates, 0) == BASE
    before = 0.1 + (BASE - 0.1) * (warm_updates - 1) / warm_updates
    assert schedule.value(BASE, warm_updates - 1, 0) == pytest.approx(before, rel=1e-9)
    assert schedule.value(BASE, warm_updates - 1, 0) < BASE


def test_milestones_in_epochs_count_from_the_trainings_start() -> None:
    """Of 6 epochs of 2 updates the first is warm-up; the drops stay at 2 and 4."""
    curve = multi_step([2, 4], gamma=0.5, unit="epochs")
    values = rates(Schedule(curve, warmup=Warmup(0.1, epochs=1)), 12, 6)
    half, quarter = BASE / 2, BASE / 4
    expected = [0.1, (0.1 + BASE) / 2, BASE, BASE, *[half] * 4, *[quarter] * 4]
    assert values == pytest.approx(expected, rel=1e-12)
    # So do steps, of which the first two fall into the warm-up here.
    often = Schedule(step(every=2, gamma=0.5, unit="updates"), warmup=Warmup(0.0, updates=4))
    assert rates(often, 8)[4:] == pytest.approx([quarter, quarter, BASE / 8, BASE / 8])


def test_inverse_sqrt_with_a_warm_up_is_the_schedule_of_attention_is_all_you_need() -> None:
    """lr(k) = d * min(k ** -0.5, k * w ** -1.5) after k updates; here d * w ** -0.5 is the base."""
    warm, n = 5, 20
    d = BASE * math.sqrt(warm)
    expected = [d * min(k**-0.5 if k else math.inf, k * warm**-1.5) for k in range(n)]
    made = Schedule(inverse_sqrt(), warmup=Warmup(0.0, updates=warm))
    assert rates(made, n) == pytest.approx(expected, rel=1e-12)


def test_milestones_after_the_end_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """No error: a run may be made shorter, and its schedule may not change then."""
    made = Schedule(multi_step([1, 30, 60], unit="epochs"))
    assert rates(made, 4, 2) == pytest.approx([BASE, BASE, BASE / 10, BASE / 10])
    assert [record.getMessage() for record in caplog.records] == [
        "the training ends before these milestones of its schedule: 30, 60 epochs"
    ]


def test_parts_in_epochs_fill_what_follows_the_warm_up() -> None:
    parts = composite([{"name": "constant"}, {"name": "linear"}], [1, 2], "epochs")
    made = Schedule(parts, warmup=Warmup(0.0, epochs=1))
    expected = [0, BASE / 2, BASE, BASE, *(BASE * (1 - k / 4) for k in range(4))]
    assert rates(made, 8, 4) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ConfigError, match=r"\[1, 2\] epochs do not fill the 4 epochs"):
        rates(made, 10, 5)


@pytest.mark.parametrize(
    ("build", "warmup", "expected"),
    [
        (multi_step([2, 3], unit="epochs"), None, [1.0] * 8 + [0.1] * 2 + [0.01] * 2),
        (step(every=2, unit="epochs"), None, [1.0] * 8 + [0.1] * 4),
        (constant(), Warmup(0.0, epochs=1.5), [k / 6 for k in range(6)] + [1.0] * 6),
        (composite([{"name": "constant"}, {"name": "linear"}], [2, 2], "epochs"), None,
         [1.0] * 8 + [1.0, 0.75, 0.5, 0.25]),
        (composite([{"name": "constant"}, {"name": "linear"}], [1, None], "epochs"),
         Warmup(0.0, epochs=1), [0, 0.25, 0.5, 0.75] + [1.0] * 4 + [1.0, 0.75, 0.5, 0.25]),
    ],
)  # fmt: skip
def test_epochs_may_be_of_different_lengths(
    build: Any, warmup: Warmup | None, expected: list[float]
) -> None:
    """Two epochs of 4 updates and two of 2: what is said in epochs falls on their borders."""
    lengths = EpochLengths({1: 4, 3: 2})
    schedule = Schedule(build, warmup=warmup)
    schedule.plan(12, 4, lengths)
    values = [schedule.value(1.0, k, lengths.split(k)[0]) for k in range(12)]
    assert values == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_task_whose_batch_size_changes_knows_where_its_epochs_begin() -> None:
    """8 samples in batches of 2, and from epoch 3 on of 4."""
    task = r0(
        range(8), {1: 2, 3: 4}, epochs=4, optimizer=RecordingSGD,  # type: ignore[arg-type]
        schedule=Schedule(multi_step([2, 3], unit="epochs")),
    )  # fmt: skip
    train(task, learning_rate=LearningRate())
    optimizer = task.optimizers["optimizer"]
    assert isinstance(optimizer, RecordingSGD)
    used = [rate for (rate,) in optimizer.rates]
    assert used == pytest.approx([1.0] * 8 + [0.1] * 2 + [0.01] * 2)


def test_an_error_names_the_place_of_its_schedule() -> None:
    made = Schedule(inverse_sqrt(), key="schedule.lr")
    with pytest.raises(ConfigError, match=r"^schedule\.lr\.length: give a length"):
        rates(made, 10)


# --- intervals ---


def test_by_epoch_the_value_changes_with_the_epoch_only() -> None:
    values = rates(Schedule(cosine(), interval="epoch"), 12, 4)
    expected = [BASE * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert values == pytest.approx([value for value in expected for _ in range(3)], rel=1e-12)


def test_another_interval_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'batch'") as error:
        Schedule(cosine(), interval="batch")
    assert error.value.key == "schedule.interval"


def test_a_new_plan_spreads_the_schedule_anew() -> None:
    schedule = Schedule(cosine(), warmup=Warmup(0.1, updates=2))
    first = rates(schedule, 10)
    longer = rates(schedule, 20)
    assert longer[:2] == pytest.approx(first[:2])
    assert longer == rates(Schedule(cosine(), warmup=Warmup(0.1, updates=2)), 20)


# --- joined curves ---


def test_joined_curves_each_see_their_own_0_to_1() -> None:
    asked: list[tuple[str, float]] = []

    def part(name: str) -> Any:
        return lambda where: asked.append((name, where)) or 0.0

    joined = Joined([part("a"), part("b"), part("c")], [0.25, 0.5, 0.25])
    for where in (0.0, 0.125, 0.25, 0.5, 0.75, 0.875, math.nextafter(1.0, 0.0)):
        joined(where)
    assert asked[:6] == [("a", 0), ("a", 0.5), ("b", 0), ("b", 0.5), ("c", 0), ("c", 0.5)]
    assert asked[6][0] == "c"
    assert 1 - 1e-12 < asked[6][1] < 1


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_each_part_has_exactly_its_updates(shares: list[int], scale: int) -> None:
    """Lengths that are fractions of N updates: however they round, no part is one short."""
    n = sum(shares) * scale
    parts = [ConstantParamScheduler(float(number)) for number in range(len(shares))]
    joined = Joined(parts, [share / sum(shares) for share in shares])
    values = [joined(k / n) for k in range(n)]
    expected = [float(number) for number, share in enumerate(shares) for _ in range(share * scale)]
    assert values == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_no_part_is_asked_outside_0_to_1(shares: list[int], where: float) -> None:
    asked: list[float] = []

    def part(inside: float) -> float:
        asked.append(inside)
        return 0.0

    Joined([part] * len(shares), [share / sum(shares) for share in shares])(where)  # type: ignore[list-item]
    assert len(asked) == 1
    assert 0 <= asked[0] < 1


@pytest.mark.parametrize(
    ("parts", "lengths"), [(0, []), (1, [0.5]), (2, [1.0]), (2, [1.5, -0.5]), (2, [0.0, 1.0])]
)
def test_lengths_that_do_not_make_a_whole_are_an_error(parts: int, lengths: list[float]) -> None:
    with pytest.raises(ConfigError) as error:
        Joined([LinearParamScheduler(0, 1)] * parts, lengths)
    assert error.value.key == "schedule.lengths"


# --- errors of the curves ---


def lengths(given: list[float | None], unit: str) -> Any:
    """Two parts of these lengths on 64 updates, 4 epochs."""
    return composite([{"name": "constant"}] * 2, given, unit)(1.0, STRETCH)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: multi_step([0.5, 0.2]), "schedule.milestones"),
        (lambda: multi_step([0.0, 0.2]), "schedule.milestones"),
        (lambda: multi_step([0.5, 1.0]), "schedule.milestones"),
        (lambda: multi_step([0.5], factors=[0.1, 0.2]), "schedule.factors"),
        (lambda: multi_step([0.5, 0.5])(1.0, STRETCH), "schedule.milestones"),
        (lambda: step(0), "schedule.steps"),
        (lambda: composite([{"end": 1}], [1.0]), "schedule.parts.0.name"),
        (lambda: composite([{"name": "constant"}], [0.5]), "schedule.lengths"),
        (lambda: composite([{"name": "constant"}], [0.5, 0.5]), "schedule.lengths"),
        (lambda: composite([{"name": "constant"}], [None]), "schedule.lengths"),
        (lambda: lengths([1, 2], "epochs"), "schedule.lengths"),
        (lambda: lengths([70, None], "updates"), "schedule.lengths"),
        (lambda: lengths([None, 1], "epochs"), "schedule.lengths"),
        (lambda: multi_step([1], unit="hours"), "schedule.unit"),
        (lambda: multi_step([0], unit="epochs"), "schedule.milestones"),
        (lambda: multi_step([1], unit="epochs")(1.0, Stretch(8, 2, 8, 2)), "schedule.milestones"),
        (lambda: step(), "schedule.steps"),
        (lambda: step(2, 0.5), "schedule.steps"),
        (lambda: step(2, unit="epochs"), "schedule.unit"),
        (lambda: step(every=0), "schedule.every"),
        (lambda: cosine_restarts(0), "schedule.cycles"),
        (lambda: cosine_restarts(2, growth=0), "schedule.growth"),
        (lambda: cosine_restarts(2, decay=-1), "schedule.decay"),
        (lambda: inverse_sqrt(0), "schedule.length"),
        (lambda: inverse_sqrt()(1.0, STRETCH), "schedule.length"),
    ],
)
def test_wrong_options_name_their_key(make: Callable[[], Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.key == key


# --- rates ---


def optimizer(**options: Any) -> torch.optim.SGD:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    groups = [{"params": one.parameters(), "lr": 1.0}, {"params": other.parameters()}]
    return torch.optim.SGD(groups, lr=0.5, **options)


def test_each_group_keeps_its_own_base() -> None:
    made = optimizer(momentum=0.8)
    schedules = [Schedule(cosine()), Schedule(constant(), option="momentum")]
    for schedule in schedules:
        schedule.plan(4, 1)
    applied = Rates(made, schedules)
    for k in range(4):
        applied.set(k, 0)
        factor = (1 + math.cos(math.pi * k / 4)) / 2
        assert [g["lr"] for g in made.param_groups] == pytest.approx([factor, 0.5 * factor])
        assert [g["momentum"] for g in made.param_groups] == [0.8, 0.8]
    assert [g["base_lr"] for g in made.param_groups] == [1.0, 0.5]


def test_a_rate_that_is_a_tensor_is_filled_in_place() -> None:
    """A compiled or captured step reads the tensor that it was made with, and no other."""
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    rate = torch.tensor(0.5)
    made = torch.optim.Adam(
        [{"params": one.parameters()}, {"params": other.parameters(), "lr_scale": 0.5}], lr=rate
    )
    schedule = Schedule(linear(), scale_with_batch=ScaleWithBatch(base=8))
    schedule.plan(4, 1)
    applied = Rates(made, [schedule], batch_size=16)
    tensors = [group["lr"] for group in made.param_groups]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    for k in range(4):
        applied.set(k, 0)
        assert all(g["lr"] is t for g, t in zip(made.param_groups, tensors, strict=True))
        value = 0.5 * 2 * (1 - k / 4)  # of twice the batch size
        assert [float(tensor) for tensor in tensors] == [value, value / 2]
    assert [group["base_lr"] for group in made.param_groups] == [1.0, 1.0]


def test_groups_that_share_a_tensor_get_rates_of_their_own() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    rate = torch.tensor(0.5)
    groups = [
        {"params": one.parameters(), "lr": rate},
        {"params": other.parameters(), "lr": rate, "lr_scale": 0.5},
    ]
    made = torch.optim.Adam(groups, lr=rate)
    schedule = Schedule(constant())
    schedule.plan(4, 1)
    Rates(made, [schedule]).set(0, 0)
    assert [float(group["lr"]) for group in made.param_groups] == [0.5, 0.25]


def test_rates_made_again_take_the_base_and_not_the_value_of_the_moment() -> None:
    made = optimizer()
    schedule = Schedule(cosine())
    schedule.plan(4, 1)
    Rates(made, [schedule]).set(3, 0)
    again = Rates(made, [schedule])
    again.set(0, 0)
    assert [g["lr"] for g in made.param_groups] == [1.0, 0.5]


def test_an_option_that_the_optimizer_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"SGD has no option 'betas'.*momentum"):
        Rates(optimizer(), [Schedule(constant(), option="betas")])


def test_two_schedules_for_one_option_are_an_error() -> None:
    with pytest.raises(ConfigError, match="same option"):
        Rates(optimizer(), [Schedule(constant()), Schedule(cosine())])
