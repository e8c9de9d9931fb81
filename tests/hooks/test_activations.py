"""Hook ``activations``: numbers, cadence, outputs of any kind, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Compile,
    ConfigError,
    Data,
    ModelOptions,
    Phases,
    Run,
    Task,
    TensorData,
    Trainer,
)
from phaseloop.hooks.activations import Activations
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.metrics_file import MetricsFile
from phaseloop.hooks.row_sync import RowSync
from tests.contract.test_spd import reads_between
from tests.rigs import equal, pairs, process, r1
from tests.rigs.probes import BreakAt, SkipAt, watch
from tests.rigs.r0 import train

NAN, INF = float("nan"), float("inf")


class Relay(nn.Module):
    """Gives on what it is given, or what a function makes of it."""

    def __init__(self, change: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return x if self.change is None else self.change(x)


class Net(nn.Module):
    """w times the mean of the batch, whose rows pass through ``relay`` before: as they are."""

    def __init__(self, change: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.relay = Relay(change)

    def forward(self, x: Tensor) -> Tensor:
        self.relay(x)
        return self.w * x.nan_to_num(0, 0, 0).mean()


def measured(
    folder: Path,
    rows: list[list[float]],
    batch_size: int,
    hook: Activations | None = None,
    model: nn.Module | None = None,
    log_every: int = 1,
    hooks: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> dict[int, dict[str, float]]:
    """By update, what was logged of ``relay``; an epoch of these rows in order."""
    model = Net() if model is None else model
    settings: dict[str, Any] = {
        "criterion": lambda output, target: output,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": Data(TensorData(torch.tensor(rows)), batch_size, shuffle=False, **(data or {})),
        "phases": Phases(epochs=1),
        "run": Run(str(folder), log_every=log_every),
    }
    task = Task(model=model, **{**settings, **options})
    train(task, act=hook or Activations(), rows=MetricsFile(), **(hooks or {}))
    return logged(folder)


def logged(folder: Path) -> dict[int, dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["update"]: {
            name.removeprefix("activations/"): float(value)
            for name, value in row.items()
            if name.startswith("activations/")
        }
        for row in found
        if "loss" in row
    }


def expected(values: Tensor, name: str = "relay") -> dict[str, Any]:
    """Of all these values as one, by their definitions."""
    flat = values.double().flatten()
    finite = flat[torch.isfinite(flat)]
    numbers = {
        "mean": float(finite.mean()),
        "std": float((finite - finite.mean()).square().mean().sqrt()),
        "zeros": float((flat == 0).double().mean()),
        "absmax": float(finite.abs().max()),
        "nonfinite": 1 - len(finite) / len(flat),
    }
    return {f"{name}/{what}": pytest.approx(value, rel=1e-6) for what, value in numbers.items()}


ROWS = [[1.0, 0.0, 5.0], [-7.0, 2.5, 0.0], [100.0, 101.0, 99.0], [0.0, 0.0, -0.5], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize("micro_batch_size", [None, 2, 1])
def test_numbers_of_a_batch_however_it_is_cut(tmp_path: Path, micro_batch_size: int | None) -> None:
    """Batches of 3 and 2 rows; pieces of a batch differ in size and far in their means."""
    found = measured(tmp_path, ROWS, 3, data={"micro_batch_size": micro_batch_size})
    values = torch.tensor(ROWS)
    assert found == {1: expected(values[:3]), 2: expected(values[3:])}


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    rows = [[1.0, NAN, 3.0, 0.0], [INF, 5.0, -INF, 0.0], [NAN] * 4, [NAN] * 4]
    found = measured(tmp_path, rows, 2)
    assert found[1] == expected(torch.tensor(rows[:2]))
    assert found[1]["relay/nonfinite"] == 3 / 8
    assert found[2]["relay/nonfinite"] == 1
    assert all(found[2][f"relay/{what}"] != found[2][f"relay/{what}"] for what in ("mean", "std"))
    assert found[2]["relay/absmax"] != found[2]["relay/absmax"]


def test_a_large_mean_does_not_drown_a_small_spread(tmp_path: Path) -> None:
    """Squares of 10000 leave nothing of 0.5 squared in single precision."""
    rows = [[10000.0, 10001.0], [10000.0, 10001.0]]
    found = measured(tmp_path, rows, 2, data={"micro_batch_size": 1})
    assert found[1]["relay/std"] == pytest.approx(0.5, rel=1e-6)


def test_outputs_of_several_tensors_have_names(tmp_path: Path) -> None:
    def change(x: Tensor) -> Any:
        return {"out": x, "state": (x + 1, [x * 2]), "index": x.long(), "none": None}

    found = measured(tmp_path, ROWS[:1], 1, model=Net(change))
    x = torch.tensor(ROWS[0])
    wanted = {"relay/out": x, "relay/state/0": x + 1, "relay/state/1/0": x * 2}
    assert found[1] == {k: v for name, t in wanted.items() for k, v in expected(t, name).items()}


def test_a_module_that_is_called_twice_counts_twice(tmp_path: Path) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.relay(x * 3)
            return super().forward(x)

    found = measured(tmp_path, ROWS[:2], 2, model=Twice())
    x = torch.tensor(ROWS[:2])
    assert found[1] == expected(torch.cat([x, x * 3]))


def test_bfloat16(tmp_path: Path) -> None:
    """The output of a linear layer is bfloat16 within autocast: 257 is 256 there, and 0.3 is not
    what it was; the numbers are those of what came out, taken in more than bfloat16."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relay = nn.Linear(3, 3, bias=False)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            output = self.relay(x)
            self.seen.append(output.detach())
            return output.float().mean()

    model = Linear()
    with torch.no_grad():
        model.relay.weight.copy_(torch.eye(3))
    rows = [[257.0, 0.3, 1.0], [0.0, 2.0, 3.0]] * 40
    found = measured(
        tmp_path, rows, 80, model=model, precision="bfloat16", data={"micro_batch_size": 40}
    )
    assert model.seen[0].dtype == torch.bfloat16
    assert found[1] == expected(torch.cat(model.seen))
    assert found[1]["relay/absmax"] == 256


# --- when ---


def hooked(task: Task) -> bool:
    return any(m._forward_hooks for m in task.bare_model.modules())


@pytest.mark.parametrize(
    ("every", "measured_at"), [(None, [4, 8]), (3, [3, 6, 9]), (1, list(range(1, 11)))]
)
def test_modules_are_hooked_at_the_updates_that_are_measured(
    tmp_path: Path, every: int | None, measured_at: list[int]
) -> None:
    """Log points at 4 and 8; a test after each update, in which nothing is measured."""
    seen = watch("on_forward", lambda t: (t.progress.updates + 1, t.train, hooked(t)))
    rows = [[float(n)] for n in range(1, 11)]
    found = measured(
        tmp_path, rows, 1, Activations(every_updates=every), log_every=4, hooks={"seen": seen},
        test=Data(TensorData(torch.full((3, 1), 1000.0)), 1),
        phases=Phases(epochs=1, test_every_updates=1, test_every_epochs=None),
    )  # fmt: skip
    in_training = [update for update, trains, armed in seen.seen if trains and armed]
    assert in_training == measured_at
    # Update k sees the number k; a row has the mean since the last one.
    for log_point in (4, 8):
        since = [k for k in measured_at if log_point - 4 < k <= log_point]
        assert found[log_point]["relay/mean"] == pytest.approx(sum(since) / len(since))


def test_at_the_end_no_module_is_hooked(tmp_path: Path) -> None:
    model = Net()
    measured(tmp_path, ROWS, 1, model=model)
    assert not model.relay._forward_hooks


def test_an_update_that_is_skipped_is_not_measured(tmp_path: Path) -> None:
    """The third window takes the place of the second as update 2."""
    found = measured(tmp_path, [[1.0], [50.0], [3.0]], 1, hooks={"skip": SkipAt(2)})
    assert {update: row["relay/mean"] for update, row in found.items()} == {1: 1.0, 2: 3.0}


def test_an_attempt_that_ran_out_of_memory_is_not_measured(tmp_path: Path) -> None:
    class Full(Net):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return output

    class Marked(Full):
        """What the broken attempt lets through is not what counts."""

        def forward(self, x: Tensor) -> Tensor:
            self.relay(x * 1000) if len(x) > 2 else None
            return super().forward(x)

    found = measured(tmp_path, ROWS[:4], 4, model=Marked(), hooks={"fit": FitMemory()})
    assert found[1] == expected(torch.tensor(ROWS[:4]))


def test_recomputed_activations_change_no_number(tmp_path: Path) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    found = measured(
        tmp_path, ROWS[:3], 3, Activations(["body.relay"]), model=Body(),
        model_options=ModelOptions(checkpoint=["body"]), data={"micro_batch_size": 2},
    )  # fmt: skip
    assert found[1] == expected(torch.tensor(ROWS[:3]), "body.relay")


def test_nothing_is_read_from_the_device_between_log_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reads_between(monkeypatch, tmp_path, act=Activations(every_updates=1)) == 0


# --- exactness ---


def test_the_training_is_the_same_and_a_resume_logs_the_same(tmp_path: Path) -> None:
    """Stopped in the second epoch, resumed in a new process, compared with an undisturbed run."""
    plain, watched, folder = equal.reference(), tmp_path / "watched", tmp_path / "run"
    acts = {"act": Activations(["0", "2"], every_updates=3)}
    options: dict[str, Any] = {"run": {"log_every": 6}}
    process.result(r1.train, watched, equal.probe_of(watched), hooks=acts, **options)
    ended = process.run(
        r1.train, folder, equal.probe_of(folder), hooks={**acts, "stop": BreakAt(13)},
        save={"every_updates": 1}, **options,
    )  # fmt: skip
    assert ended.code == 1
    process.result(r1.train, folder, equal.probe_of(folder), hooks=acts, **options)
    equal.assert_eq(watched, folder)
    assert "0/std" in logged(folder)[24] and "2/zeros" in logged(folder)[24]
    found = equal.differ("", *(r1.lines(equal.probe_of(f), "update")[-1] for f in (plain, watched)))
    assert [line for line in found if "process" not in line] == []


# --- which modules, and what cannot be ---


def test_patterns_name_modules_and_none_means_the_innermost() -> None:
    def names(*patterns: str) -> list[str]:
        hook = Activations(patterns)
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))
        task = Task(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            train=Data(TensorData(torch.zeros(1, 1), torch.zeros(1, 1)), 1),
            phases=Phases(epochs=1),
        )
        Trainer(task, {"act": hook}).train()
        return list(hook._chosen)

    assert names() == ["0.0", "0.1", "1"]
    assert names("0*") == ["0", "0.0", "0.1"]
    assert names("1", "*.1") == ["0.1", "1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["relai"]}, r"hooks.act.modules: the pattern 'relai' matches no module. Did"),
        ({"modules": "relay"}, r"hooks.activations.modules: give a list, not 'relay'"),
        ({"every_updates": 0}, "hooks.activations.every_updates: 0 is less than 1"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measured(tmp_path, ROWS, 1, Activations(**options))


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks.act: the model is compiled.*model.compile"):
        measured(tmp_path, ROWS, 1, model_options=ModelOptions(compile=Compile(backend="eager")))
    model = Net()
    model.relay.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"hooks.act: the model is compiled"):
        measured(tmp_path / "part", ROWS, 1, model=model)


# --- several processes ---


def of_ranks(folder: Path) -> Any:
    model = Net()
    task = Task(
        model=model,
        criterion=lambda output, target: output,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(torch.tensor(ROWS)), 3, shuffle=False, micro_batch_size=1),
        phases=Phases(epochs=1),
        run=Run(str(folder), log_every=1),
        backend=pairs.ddp(),
    )
    pairs.train(task, act=Activations(), sync=RowSync(), rows=MetricsFile())
    return logged(folder) if task.primary else None


def test_of_several_processes_the_mean_is_that_of_the_batch(tmp_path: Path) -> None:
    """Three rows on two ranks: two and one, and one more of weight 0 that does not count."""
    ((found, _),) = pairs.results([(of_ranks, {"folder": tmp_path})])
    for update, rows in ((1, ROWS[:3]), (2, ROWS[3:])):
        whole = expected(torch.tensor(rows))
        for what in ("mean", "zeros", "nonfinite"):
            assert found[update][f"relay/{what}"] == whole[f"relay/{what}"]
