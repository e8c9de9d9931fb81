"""Hook ``non_finite``: which update, parameter, batch and samples it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Data, Gradients, NonFiniteError, Phases, Run, Task, TensorData
from phaseloop.engine import watched
from phaseloop.hooks.average import Average
from phaseloop.hooks.metrics_file import MetricsFile
from phaseloop.hooks.non_finite import NonFinite
from tests.rigs.probes import SkipAt, watch
from tests.rigs.r0 import Scalar, r0, train, weight

NAN = float("nan")


def error(task: Task, **hooks: Any) -> str:
    """The message of the error that ends the run."""
    hooks = hooks or {"finite": NonFinite()}
    with pytest.raises(NonFiniteError) as caught:
        train(task, **hooks)
    return str(caught.value)


def test_the_first_loss_that_is_not_finite_is_named_with_its_samples() -> None:
    """Batches of 2; sample 7 is in the fourth. The row is due at update 10."""
    xs = [1.0] * 20
    xs[7] = NAN
    said = error(r0(xs, 2))
    assert said.startswith("the loss of update 4 is not finite (epoch 1, batch 4, samples 6, 7)")
    assert "weights that are not finite now: w" in said
    assert "policy=skip" in said


def test_of_a_window_only_the_micro_batch_is_named() -> None:
    xs = [1.0] * 20
    xs[7] = NAN
    assert "batch 2, samples 6, 7)" in error(r0(xs, 4, data={"micro_batch_size": 2}))


class Root(Scalar):
    """w * sqrt(x): at x = 0 finite, with gradients that are not."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.shift = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * (x + self.shift).sqrt()


def root(**options: Any) -> Task:
    """Batches of 2; the gradient of ``shift`` is infinite in the third, from sample 4."""
    model = Root()
    settings: dict[str, Any] = {
        "model": model,
        "criterion": lambda output, target: output.mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "train": Data(TensorData(torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 1])), 2, shuffle=False),
        "phases": Phases(epochs=1),
    }
    return Task(**{**settings, **options})


def hold_shift(task: Task) -> None:
    """The first two updates leave ``shift`` at 0, where the third finds its gradient infinite."""
    if task.progress.updates < 2:
        task.bare_model.shift.grad = None


HOLD = {"hold": watch("on_gradients", hold_shift, order=1)}


def test_without_a_look_at_gradients_both_updates_are_named() -> None:
    said = error(root(), **HOLD, finite=NonFinite())
    assert said.startswith(
        "the loss of update 4 is not finite (epoch 1, batch 4, samples 6, 7), or a gradient of "
        "update 3 was not (epoch 1, batch 3, samples 4, 5): hooks.non_finite.gradients=true"
    )


def test_with_one_the_parameters_are_named() -> None:
    said = error(root(run=Run(log_every=3)), **HOLD, finite=NonFinite(gradients=True))
    assert said.startswith(
        "a gradient of update 3 is not finite: shift (epoch 1, batch 3, samples 4, 5); "
        "weights that are not finite now: shift"
    )


def test_the_norm_that_clipping_measures_tells_too() -> None:
    said = error(root(gradients=Gradients(clip_norm=1.0)), **HOLD, finite=NonFinite())
    assert said.startswith(
        "a gradient of update 3 is not finite (epoch 1, batch 3, samples 4, 5); weights that"
    )


def test_a_log_point_before_it_leaves_one_batch_to_name() -> None:
    """At update 3 the weights were found finite: so update 4 it is."""
    xs = [1.0] * 20
    xs[7] = NAN
    said = error(r0(xs, 2, run=Run(log_every=3)))
    assert said.startswith("the loss of update 4 is not finite (epoch 1, batch 4, samples 6, 7);")


def test_skipped_windows_do_not_shift_the_numbers() -> None:
    xs = [1.0] * 20
    xs[7] = NAN
    said = error(r0(xs, 2), skip=SkipAt(2), finite=NonFinite())
    assert said.startswith("the loss of update 3 is not finite (epoch 1, batch 4, samples 6, 7)")
    assert "a gradient of update 2 was not (epoch 1, batch 3," in said


def test_weights_that_somebody_spoiled_are_named() -> None:
    def spoil(task: Task) -> None:
        with torch.no_grad():
            task.bare_model.w.fill_(NAN)

    said = error(r0([1], 1), spoil=watch("on_update", spoil), finite=NonFinite())
    assert said.startswith("at update 1, weights that are not finite now: w;")


def test_raw_weights_are_judged_while_averages_are_in_the_model() -> None:
    def spoil(task: Task) -> None:
        if task.progress.updates == 1:
            with torch.no_grad():
                task.bare_model.w.fill_(NAN)

    task = r0([1, 1], 1, test=Data(TensorData(torch.ones(1)), 1))
    average = Average(kind="swa", every_updates=1, start_updates=0)
    hooks = {"spoil": watch("on_update", spoil, order=99), "average": average,
             "finite": NonFinite()}  # fmt: skip
    assert "not finite now: w" in error(task, **hooks)


def test_what_waits_is_bounded_and_then_the_samples_are_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "_KEPT", 4)
    xs = [1.0] * 20
    xs[2] = NAN
    hook = NonFinite()
    waiting = watch("on_step", lambda task: len(hook._watched._seen))
    said = error(r0(xs, 1, run=Run(log_every=100)), finite=hook, waiting=waiting)
    assert max(waiting.seen) < 4
    assert said.startswith("the loss or a gradient of update 3 is the first that is not finite")


def test_many_samples_are_counted() -> None:
    xs = [NAN] * 40
    said = error(r0(xs, 40))
    assert f"samples {', '.join(map(str, range(32)))} and 8 more)" in said


def test_skip_names_parameters_and_samples(tmp_path: Path) -> None:
    xs = [1.0] * 8
    xs[5] = NAN
    task = r0(xs, 4, data={"micro_batch_size": 2}, run=Run(str(tmp_path), log_every=1))
    train(task, finite=NonFinite("skip"), rows=MetricsFile())
    assert weight(task) == -1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (skip,) = [row for row in rows if row.get("event") == "skip"]
    assert skip["update"] == 2
    assert skip["reason"] == (
        "not finite: a gradient of w, and the loss (epoch 1, batch 2, samples 4, 5)"
    )


def test_skip_of_a_gradient_alone() -> None:
    reasons = watch("on_gradients", lambda task: task.skip_reason)
    train(root(), **HOLD, finite=NonFinite("skip"), reasons=reasons)
    assert reasons.seen[2] == ("not finite: a gradient of shift (epoch 1, batch 3, samples 4, 5)")


def in_parts(task: Task) -> None:
    """A step that goes backward for each of two parts of a loss."""
    batch = task.next_batch()
    loss = task.criterion(task.forward(batch.input), None)
    if task.train:
        task.backward(loss)
        task.backward(0.1 * task.model.w)
        task.update()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_samples_of_a_loss_in_parts_are_named_once(policy: str) -> None:
    xs = [1.0] * 6
    xs[3] = NAN
    task = r0(xs, 2, train_step=in_parts)
    if policy == "stop":
        said = error(task)
    else:
        reasons = watch("on_gradients", lambda task: task.skip_reason)
        train(task, finite=NonFinite("skip"), reasons=reasons)
        said = reasons.seen[1]
    assert "(epoch 1, batch 2, samples 2, 3)" in said


def test_options_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"non_finite\.policy: 'go' is not 'stop' or 'skip'"):
        NonFinite("go")
    with pytest.raises(ConfigError, match=r"non_finite\.gradients: skip looks at them anyway"):
        NonFinite("skip", gradients=True)
