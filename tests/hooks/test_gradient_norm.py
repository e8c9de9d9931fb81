"""Hook ``gradient_norm``: what is recorded, when, and that nothing is computed in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Data, Gradients, Phases, Run, Task, TensorData
from phaseloop.hooks.gradient_norm import GradientNorm
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs.probes import SkipAt, watch
from tests.rigs.r0 import train


class Sum(nn.Module):
    """a * 3k + b * 4k for the k-th sample: gradients 3k and 4k."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.0))
        self.b = nn.Parameter(torch.tensor(0.0))
        self.unused = nn.Parameter(torch.tensor(0.0))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.a * x + 4 * self.b * x + self.empty.sum()


def rows(folder: Path, hook: GradientNorm, log_every: int = 2, **more: Any) -> dict[int, Any]:
    """What was logged of gradient norms, by update, of samples k = 1, 2, ... 6."""
    hooks = more.pop("hooks", {})
    model = Sum()
    task = Task(
        model=model,
        criterion=lambda output, target: output.mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        train=Data(TensorData(torch.arange(1.0, 7)), 1, shuffle=False),
        phases=Phases(epochs=1),
        run=Run(str(folder), log_every=log_every),
        **more,
    )
    train(task, norm=hook, rows=MetricsFile(), **hooks)
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["update"]: {k: v for k, v in row.items() if k.startswith("gradient_norm")}
        for row in found
        if "loss" in row
    }


CUBES = (3**3 + 4**3) ** (1 / 3)


@pytest.mark.parametrize(
    ("norm_type", "per_k"),
    [(2.0, 5.0), (1.0, 7.0), (float("inf"), 4.0), (3.0, CUBES)],
)
def test_the_norm_of_the_update_whose_row_it_is(
    tmp_path: Path, norm_type: float, per_k: float
) -> None:
    found = rows(tmp_path, GradientNorm(norm_type))
    assert found == {k: {"gradient_norm": pytest.approx(per_k * k)} for k in (2, 4, 6)}


def test_per_parameter(tmp_path: Path) -> None:
    found = rows(tmp_path, GradientNorm(per_parameter=True))
    expected = {"gradient_norm": 10.0, "gradient_norm/a": 6.0, "gradient_norm/b": 8.0}
    assert found[2] == pytest.approx(expected)  # and none of a parameter without a gradient


@pytest.mark.parametrize(
    "gradients",
    [
        Gradients(clip_norm=1.0),
        Gradients(clip_norm=1.0, norm_type=1.0),
        Gradients(clip_value=0.1),
        Gradients(clip_norm=1.0, clip_value=0.1),
    ],
    ids=str,
)
def test_it_is_the_norm_before_clipping(tmp_path: Path, gradients: Gradients) -> None:
    found = rows(tmp_path, GradientNorm(), gradients=gradients)
    assert [found[k]["gradient_norm"] for k in (2, 4, 6)] == pytest.approx([10, 20, 30])


def test_what_clipping_measures_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(GradientNorm, "_measure", refuse)
    found = rows(tmp_path, GradientNorm(), gradients=Gradients(clip_norm=1.0))
    assert [found[k]["gradient_norm"] for k in (2, 4, 6)] == pytest.approx([10, 20, 30])


def test_between_log_points_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    measure = GradientNorm._measure

    def noted(self: GradientNorm, task: Task) -> Any:
        updates.append(task.progress.updates + 1)
        return measure(self, task)

    monkeypatch.setattr(GradientNorm, "_measure", noted)
    rows(tmp_path, GradientNorm(), log_every=3)
    assert updates == [3, 6]


def test_a_skipped_update_has_no_norm(tmp_path: Path) -> None:
    """The second window is skipped, by a hook that comes after: update 2 is of sample 3."""
    found = rows(tmp_path, GradientNorm(), hooks={"skip": SkipAt(2)})
    assert {k: row["gradient_norm"] for k, row in found.items()} == pytest.approx({2: 15, 4: 25})


def test_a_norm_of_order_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradient_norm\.norm_type: 0\.0 is not greater than 0"):
        GradientNorm(0.0)


def test_the_values_wait_on_the_device(tmp_path: Path) -> None:
    pending = watch("on_update", lambda task: task.recorder._series.get("gradient_norm"))
    rows(tmp_path, GradientNorm(), hooks={"pending": pending})
    assert all(isinstance(v, Tensor) for series in pending.seen if series for v in series.values)
    assert any(pending.seen)
