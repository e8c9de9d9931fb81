"""Programs: how many a training compiles, and that none comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phaseloop import Data, Gradients, Schedule, Trainer, Xla
from phaseloop.engine.schedules import linear
from phaseloop.hooks.average import Average
from tests.rigs import r1
from tests.xla.cases import Compiles, results

Counts = dict[str, list[list[int]]]


def counts(case: str, folder: str, width: int) -> Counts:
    """Of a run of R1 on XLA, with a log row and a look at the weights at each update or few."""
    hook = Compiles()
    options = dict(CASES[case])
    save, more = options.pop("save", {}), options.pop("more", {})
    task = r1.make_task(Path(folder), backend=Xla(), extra=width, **options)
    Trainer(task, r1.make_hooks(save=save, compiles=hook, **more)).train()
    return hook.counts


# From 0, by steps of .2, through 1, to 1.8.
RATES = Schedule(linear(0.0, 20.0))

CASES: dict[str, dict[str, Any]] = {
    # So rows and checkpoints have 1, 2, 3 and 4 values of each name.
    "rates": {
        "epochs": 1, "schedule": RATES, "save": {"every_updates": 3}, "run": {"log_every": 4},
    },
    "ragged": {"epochs": 2, "train": Data(r1.Samples(41), 4)},
    "tests": {"epochs": 3, "test": True},
    "augmented": {
        "epochs": 2, "data": {"augment": lambda x, draws: x + 0.1 * draws.normal(4)},
    },
    "pieces": {
        # No two numbers of a step are equal, which would be one number in the program: a piece's
        # share is 1/4, and 1 less the decay 9/(10 + k) after k < 20 samples.
        "epochs": 2, "data": {"accumulate": 4}, "gradients": Gradients(clip_norm=1.0),
        "more": {"average": Average("ema", warmup=True)},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    # A width that no other case has, else what is compiled for one is there for the next.
    cases = [
        (counts, {"case": case, "folder": str(tmp_path_factory.mktemp(case) / "run"), "width": n})
        for n, case in enumerate(CASES, 11)
    ]
    return dict(zip(CASES, results(cases), strict=True))


def test_a_steady_training_compiles_nothing_whatever_the_rate(found: dict[str, Counts]) -> None:
    within, behind = zip(*found["rates"]["train"], strict=True)
    # The second step has momentum. Behind the third, before the first save: whether the weights
    # are finite; behind the last may be the metrics.
    assert (within[1], behind[2]) == (1, 1)
    assert sum(within[2:]) == 0
    assert sum(behind[:2] + behind[3:-1]) == 0, "a log row or a checkpoint was compiled"


def test_a_ragged_end_compiles_once(found: dict[str, Counts]) -> None:
    steps = found["ragged"]["train"]
    assert len(steps) == 2 * 11
    assert steps[10][0] == 1
    assert sum(within for within, _ in steps[2:10] + steps[11:]) == 0


def test_a_test_phase_compiles_once(found: dict[str, Counts]) -> None:
    train, test = found["tests"]["train"], found["tests"]["test"]
    assert len(test) == 3 * 2
    assert [within for within, _ in test] == [1, 1, 0, 0, 0, 0]  # batches of 4 and 2
    assert sum(within for within, _ in train[2:]) == 0
    # Between two epochs: the metrics, what a test puts aside, and what it puts back.
    assert sum(behind for _, behind in train[20:] + test[2:]) == 0


def test_micro_batches_clipping_and_averages_compile_in_the_first_windows(
    found: dict[str, Counts],
) -> None:
    steps = found["pieces"]["train"]
    assert len(steps) == 2 * 10 * 4
    # The first window makes the momentum, and the average's first sample goes with the second.
    assert sum(within for within, _ in steps[3 * 4 :]) == 0


def test_augmentation_compiles_nothing_later(found: dict[str, Counts]) -> None:
    steps = found["augmented"]["train"]
    assert len(steps) == 2 * 10
    assert sum(within for within, _ in steps[2:]) == 0
