"""Replays: exactly the run's update, what was planted is named, and nothing of the run changes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import (
    ConfigError,
    Hook,
    LossScale,
    PhaseloopError,
    Phases,
    Precision,
    Run,
    Stage,
    Task,
    TorchSchedule,
    Trainer,
)
from phaseloop.engine.checkpoint.store import Store
from phaseloop.engine.errors import CheckpointError
from phaseloop.engine.run_folder import RunFolder
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.tools import replay as program
from phaseloop.tools.replay import replay, report
from phaseloop.tools.replaying.found import Replay
from phaseloop.tools.run import DONE, ERROR, WRONG_CONFIG
from phaseloop.tools.run import run as train_here
from tests.contract.test_opt import gan_task
from tests.hooks import test_roll_back as rolling
from tests.rigs import cli, faults, process, r1
from tests.rigs.faults import BAD, BATCH, UPDATE

SAVES = "hooks.checkpoint={every_updates: 7, keep_last: 2}"


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, code: int = DONE) -> Path:
    """Train in ``tmp_path`` and stay there; the run's folder."""
    cli.folder(tmp_path, fault=faults.FAULT)
    monkeypatch.chdir(tmp_path)
    assert train_here([*words, "run.dir=here"]) == code
    return tmp_path / "here"


def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Path:
    """30 updates, 10 an epoch, with dropout and random data; checkpoints after 21, 28 and 30."""
    return train(tmp_path, monkeypatch, "config=tiny", "run.log_every=1", SAVES, *words)


def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Replay:
    """The replay of a run that failed at the planted update."""
    folder = train(tmp_path, monkeypatch, "config=fault", *words, code=ERROR)
    found = replay(folder)
    assert found.update == UPDATE
    assert found.same_when_watched
    print(report(found))
    return found


def contents(folder: Path) -> dict[str, Any]:
    """Every file with its bytes and time."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        if path.is_file()
        else path.stat().st_mtime_ns
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def losses(folder: Path) -> dict[int, float]:
    """The losses of the run's log."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["update"]: row["loss"] for row in rows if "loss" in row}


# --- it is the run ---


def test_an_update_is_the_run_s_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, monkeypatch)
    names = Store(folder / "checkpoints").names()
    assert names == ["update_000000028-1", "update_000000030-2"]
    before = contents(folder)
    found = replay(folder, 30)
    assert contents(folder) == before
    assert Path(found.start).name == "update_000000028-1"
    assert found.logged == 2 and found.differs == ""
    assert found.line is not None and found.line.loss == losses(folder)[30]
    assert found.same_when_watched and found.fault is None and found.harmless is None
    assert found.line.epoch == 3 and found.batch == (10, 10)
    (samples,) = found.micro_batches
    assert len(set(samples)) == 4
    assert set(found.gradients) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    norm = math.sqrt(sum(g**2 for g in found.gradients.values()))
    assert found.line.gradient_norm == pytest.approx(norm)
    assert {"data", "forward", "loss", "backward", "optimizer"} <= set(found.seconds)


def test_what_an_update_leaves_is_what_the_run_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path, monkeypatch)
    saved = torch.load(folder / "checkpoints" / "update_000000030-2" / "model.pt")
    found = replay(folder, 30)
    for name, (_, after) in found.parameters.items():
        assert after == float(saved[name].double().norm())


def test_without_a_checkpoint_before_it_a_replay_begins_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path, monkeypatch)
    found = replay(folder, 12)
    assert found.start == "" and found.logged == 12 and found.differs == ""
    first = replay(folder, 1)
    assert first.line is not None and first.line.loss == losses(folder)[1]
    assert first.cold and not found.cold


def test_a_range_has_a_line_for_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path, monkeypatch)
    found = replay(folder, 3, until=6)
    there = losses(folder)
    assert [(line.update, line.loss) for line in found.lines] == [
        (k, there[k]) for k in (3, 4, 5, 6)
    ]
    assert "update 6" in report(found) and "finite in all of them" in report(found)


def test_a_difference_to_the_log_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, monkeypatch)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    number, row = next(
        (n, row) for n, row in enumerate(map(json.loads, lines)) if row["update"] == 5
    )
    row["loss"] = math.nextafter(row["loss"], 1e9)
    lines[number] = json.dumps(row)
    file.write_text("\n".join(lines) + "\n")
    found = replay(folder, 7)
    assert found.differs.startswith(f"at update 5 the log has loss {row['loss']}")


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path, monkeypatch)
    file = folder / "checkpoints" / "update_000000028-1" / "model.pt"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    before = contents(folder)
    found = replay(folder, 29)
    assert contents(folder) == before
    assert found.start == "" and "update_000000028-1" in found.passed_over[0]
    assert found.line is not None and found.line.loss == losses(folder)[29]


def test_another_process_may_train_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path, monkeypatch)
    lock = RunFolder(folder)
    lock.open()
    try:
        before = contents(folder)
        assert replay(folder, 29).fault is None
        assert contents(folder) == before
    finally:
        lock.close()


def test_a_run_that_was_made_longer_is_replayed_with_the_length_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its schedule was spread over 20 updates until 20, and over 30 from there on."""
    words = ("schedule=cosine", "hooks.checkpoint.keep_last=9")
    tiny(tmp_path, monkeypatch, *words, "phases.epochs=2")
    folder = tiny(tmp_path, monkeypatch, *words)
    for update in (13, 29):
        found = replay(folder, update)
        assert found.line is not None and found.line.loss == losses(folder)[update]


def test_micro_batches_workers_and_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("data.train.micro_batch_size=2", "hooks.average.kind=ema", "precision=bfloat16",
             "data.train.workers=1", "optimizer=adam")  # fmt: skip
    folder = tiny(tmp_path, monkeypatch, *words)
    found = replay(folder, 30, overrides=["data.train.workers=0"])
    assert [len(samples) for samples in found.micro_batches] == [2, 2]
    assert found.line is not None and found.line.loss == losses(folder)[30]
    assert found.same_when_watched and found.differs == ""


def test_a_run_made_in_python(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    r1.train(folder, save={"every_updates": 4}, augment=True, optimizer_name="adam", test=True)

    def make() -> Any:
        return r1.make_task(folder, augment=True, optimizer_name="adam", test=True), r1.make_hooks()

    before = contents(folder)
    found = replay(folder, 17, make=make)
    assert contents(folder) == before
    assert found.line is not None and found.line.loss == losses(folder)[17]
    assert found.logged == 17 and found.differs == ""
    with pytest.raises(ConfigError, match=r"resolved.yaml.*make="):
        replay(folder, 17)


def closure(folder: Path | None) -> tuple[Task, dict[str, Hook]]:
    model = r1.network()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return r1.make_task(folder, model=model, optimizer=opt, train_step="closure"), r1.make_hooks(
        save={"every_updates": 6}
    )


def stages(folder: Path | None) -> tuple[Task, dict[str, Hook]]:
    phases = [
        Stage(name="a", epochs=1, schedule=r1.schedule("constant")),
        Stage(name="b", epochs=1, freeze=["0.*"], schedule=r1.schedule("warmup_cosine")),
    ]
    return r1.make_task(folder, phases=phases), r1.make_hooks(save={"every_updates": 6})


def alternating(folder: Path | None) -> tuple[Task, dict[str, Hook]]:
    run = Run(dir=None if folder is None else str(folder), threads=1, log_every=1)
    task = gan_task(run=run, every={"generator": 2}, phases=Phases(epochs=3))
    return task, r1.make_hooks(save={"every_updates": 6})


def plateau(folder: Path | None) -> tuple[Task, dict[str, Hook]]:
    """The rate of an epoch depends on the tests before it."""
    falling = TorchSchedule(
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
        metric="test/loss",
    )
    task = r1.make_task(folder, schedule=falling, test=True, phases={"test_every_updates": 3})
    return task, r1.make_hooks(save={"every_updates": 6})


def half(folder: Path | None) -> tuple[Task, dict[str, Hook]]:
    """Scales of 2**20 and some below overflow: the first windows are skipped."""
    precision = Precision("float16", LossScale(initial=2.0**20))
    return r1.make_task(folder, precision=precision), r1.make_hooks(save={"every_updates": 6})


@pytest.mark.parametrize("kind", [closure, stages, alternating, plateau, half])
def test_whatever_makes_the_updates(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    task, hooks = kind(folder)
    Trainer(task, hooks).train()
    before = contents(folder)
    for update in (1, 14):  # of stage b, where there is one
        found = replay(folder, update, make=lambda: kind(None))
        assert found.logged == update and found.differs == ""
        assert found.same_when_watched and found.fault is None
        norms = [b != a for b, a in found.parameters.values()]
        assert any(norms)
    assert contents(folder) == before


def test_an_overflow_that_is_a_skip_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    task, hooks = half(folder)
    Trainer(task, hooks).train()
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    skipped = sum(row.get("event") == "skip" and row["update"] == 1 for row in rows)
    assert skipped > 1
    found = replay(folder, 1, make=lambda: half(None))
    assert len(found.skips) == skipped and found.fault is None
    assert found.skips[0].startswith(f"gradients overflowed at loss scale {2.0**20:g}, first in ")
    assert "goes on" in report(found)
    assert found.batch == (skipped + 1, r1.UPDATES)


def test_a_run_that_rolled_back(tmp_path: Path) -> None:
    """Update 17 was not finite, and came again from checkpoint 16 in another order."""
    folder = tmp_path / "run"
    process.result(rolling.train, folder, rolling.pair_of(17), save={"keep_last": 9})
    (event,) = [row for row in rolling.events(folder) if row["number"] == 1]
    assert (event["update"], event["to"]) == (17, 16)

    def make() -> Any:
        task = r1.make_task(folder, model=rolling.Network(rolling.pair_of(17)))
        # The run's probe has drawn random numbers, so it has a part in the training.
        return task, r1.make_hooks(tmp_path / "probe", non_finite=NonFinite("roll_back"))

    for start in (16, 12):  # with checkpoint 16, and without it
        found = replay(folder, 17, make=make)
        assert Path(found.start).name.startswith(f"update_{start:09d}")
        assert found.line is not None and found.line.loss == losses(folder)[17]
        assert found.fault is None and found.differs == "" and found.logged == 17 - start
        before = replay(folder, 17, make=make, roll_backs=0)
        assert before.fault is not None and before.differs == ""
        assert before.micro_batches == [rolling._ids()[16]]
        assert "roll_backs=0" in report(found)
        if start == 16:
            for path in (folder / "checkpoints").glob("update_000000016-*"):
                shutil.rmtree(path)


def test_random_states_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, monkeypatch)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    replay(folder, 29)
    assert torch.equal(torch.rand(3), expected)


# --- what was planted is named ---


def bad(kind: str, model: str = "none") -> list[str]:
    return [f"data.train.dataset.{kind}=[{BAD}]", f"model.kind={model}"]


def test_a_sample_that_is_infinite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fault(tmp_path, monkeypatch, *bad("infinite"), "data.train.micro_batch_size=2")
    assert found.fault is not None
    (data,) = found.fault.data
    assert (data.path, data.micro_batch, data.samples) == ("input", 2, [BAD])
    assert data.result == "1 infinite of 8 elements"
    assert found.fault.samples == [BAD] and "as the data has them" in found.fault.samples_are
    assert found.micro_batches == [[4, 5], [BAD, 7]]
    first = found.fault.first
    assert first is not None and first.module_class == "Dropout"
    assert first is not None and first.kind == "read" and first.source == "the data (input)"
    assert first.micro_batch == 2 and first.stage == "forward"
    assert found.fault.what[0] == "the loss of micro-batch 2"


def test_a_module_that_divides_zero_by_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fault(tmp_path, monkeypatch, *bad("zeros", "share"), "data.train.micro_batch_size=2")
    assert found.fault is not None and found.fault.first is not None
    first = found.fault.first
    assert (first.module, first.module_class, first.operation) == ("0", "Share", "aten.div.Tensor")
    assert (first.kind, first.stage, first.micro_batch) == ("made", "forward", 2)
    assert first.result == "4 NaN of 8 elements" and first.rows == [BAD % 2]
    assert first.line.endswith("in forward: return x / x.sum(1, keepdim=True)")
    assert "tests/rigs/faults.py" in first.line
    assert found.fault.samples == [BAD] and "alone" in found.fault.samples_are
    # From the loss backwards: the bias of the last layer gets its gradient first.
    assert sorted(found.fault.gradients) == ["2.bias", "2.weight"]
    assert found.fault.parameter == found.fault.gradients[0]
    assert sorted(found.fault.weights) == ["2.bias", "2.weight"]


def test_a_nan_out_of_infinities_goes_back_to_what_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exp(500) is infinite in float32, whose largest number is about exp(88)."""
    found = fault(tmp_path, monkeypatch, *bad("large", "exponential"))
    assert found.fault is not None and found.fault.first is not None
    first, then = found.fault.first, found.fault.then
    assert (first.operation, first.result) == ("aten.exp.default", "4 infinite of 16 elements")
    assert [(event.operation, event.kind) for event in then] == [("aten.div.Tensor", "nan")]
    assert found.fault.samples == [BAD]


def test_infinities_that_do_no_harm_do_not_hide_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*bad("zeros", "masked"), f"data.train.dataset.negative=[{BAD}]"]
    found = fault(tmp_path, monkeypatch, *words)
    assert found.fault is not None and found.fault.first is not None
    assert found.fault.first.place == "the criterion" and found.fault.then == []


def test_a_logarithm_in_the_criterion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fault(tmp_path, monkeypatch, *bad("negative"))
    assert found.fault is not None and found.fault.first is not None
    first = found.fault.first
    assert first.operation == "aten.log.default" and first.module is None
    assert first.place == "the criterion" and first.stage == "loss"
    assert first.rows == [BAD % BATCH]
    assert found.fault.samples == [BAD]


def test_a_derivative_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is finite; in backward 1 / (2 sqrt(0)) is infinite, and times 0 not a number."""
    words = [*bad("zeros", "length"), "run.log_every=2"]
    found = fault(tmp_path, monkeypatch, *words)
    assert found.line is not None and found.line.loss is not None
    assert math.isfinite(found.line.loss)
    assert found.fault is not None and found.fault.first is not None
    first = found.fault.first
    assert (first.module, first.module_class) == ("0", "Length")
    assert first.operation == "aten.div.Tensor of SqrtBackward0"
    assert (first.stage, first.kind) == ("backward", "made")
    assert ".sqrt()" in first.line
    assert found.fault.then[0].kind == "nan"
    assert found.fault.parameter == "0.scale" and found.fault.gradients == ["0.scale"]
    assert found.fault.samples == [BAD] and "alone" in found.fault.samples_are


def test_an_update_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of about 1e30 are finite; times a rate of 1e30 they are not."""
    folder = train(
        tmp_path, monkeypatch, "config=fault", "criterion.name=infinite_step", "optimizer.lr=1e30",
        code=ERROR,
    )  # fmt: skip
    found = replay(folder, 1)
    assert found.fault is not None and found.fault.first is not None
    assert found.fault.what == ["2 parameters after the update"]
    assert found.fault.first.stage == "update" and found.fault.first.place == "the optimizer"
    assert found.fault.parameter == "2.weight"
    assert found.fault.samples == [] and found.fault.gradients == []


def test_an_update_after_the_first_bad_one_points_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*bad("negative"), "hooks.non_finite=null")
    folder = train(tmp_path, monkeypatch, "config=fault", *words)
    shutil.rmtree(folder / "checkpoints")
    found = replay(folder, UPDATE + 2)
    assert found.fault is not None and found.fault.earlier == UPDATE
    assert found.fault.before[:2] == ["2.weight", "2.bias"]
    assert "the optimizer's momentum_buffer of 2.bias" in found.fault.before
    assert found.fault.parameter in found.fault.before
    assert f"update={UPDATE}" in report(found)
    ranged = replay(folder, 1, until=UPDATE + 2)
    assert ranged.update == UPDATE and len(ranged.lines) == UPDATE + 2
    assert ranged.fault is not None and ranged.fault.samples == [BAD]


def test_infinities_that_do_no_harm_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("config=fault", *bad("zeros", "masked"), "phases.epochs=1")
    folder = train(tmp_path, monkeypatch, *words)
    found = replay(folder, UPDATE)
    assert found.fault is None
    assert found.harmless is not None and found.harmless.operation == "aten.log.default"
    assert "without harm" in report(found)


def test_a_skipped_window_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("config=fault", *bad("negative"), "hooks.non_finite.policy=skip")
    folder = train(tmp_path, monkeypatch, *words)
    found = replay(folder, UPDATE)
    assert len(found.skips) == 1 and "finite" in found.skips[0]
    assert found.fault is not None and found.fault.samples == [BAD]
    assert found.micro_batches == [[4, 5, BAD, 7]]
    assert found.fault.weights == [] and found.same_when_watched


def test_skipped_windows_that_are_finite_are_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(tmp_path, monkeypatch, "config=fault", "hooks.fault_skip={}", "phases.epochs=1")
    found = replay(folder, 1)
    assert found.skips == ["asked for by the test"] and found.fault is None
    assert found.micro_batches == [[4, 5, 6, 7]] and found.batch == (2, 3)
    assert found.same_when_watched


def test_an_error_at_the_update_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert train_here(["config=tiny", "hooks.tiny_fault={}", "run.dir=here"]) == ERROR
    found = replay("here", 3)
    assert found.error == "ValueError: planted fault"
    with pytest.raises(PhaseloopError, match=r"update 3|use"):
        replay("here", 9)


def test_a_range_ends_at_an_error_and_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert train_here(["config=tiny", "hooks.tiny_fault={}", "run.dir=here"]) == ERROR
    found = replay("here", 1, until=5)
    assert [line.update for line in found.lines] == [1, 2]
    assert found.update == 3 and "planted fault" in report(found)


def test_a_compiled_model_is_watched_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*bad("zeros", "share"), "model.compile={backend: eager}"]
    found = fault(tmp_path, monkeypatch, *words)
    assert found.fault is not None and found.fault.first is not None
    assert found.fault.first.module_class == "Share" and found.fault.samples == [BAD]


def test_a_value_in_python_and_json_has_no_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fault(tmp_path, monkeypatch, *bad("negative"))
    text = json.dumps(found.plain(), allow_nan=False)
    assert json.loads(text)["line"]["loss"] == "nan"


# --- the command line ---


def test_one_true_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, monkeypatch, "config=fault", *bad("zeros", "share"), code=ERROR)
    ended = subprocess.run(
        [sys.executable, str(cli.ROOT / "tools" / "replay.py"), "here", "json=true", "to=it.json"],
        cwd=tmp_path,
        env=cli.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == DONE, ended.stderr
    found = json.loads(ended.stdout)
    assert found == json.loads((tmp_path / "it.json").read_text())
    assert found["fault"]["samples"] == [BAD] and found["update"] == UPDATE


def test_a_folder_may_be_called_as_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(tmp_path, monkeypatch).rename(tmp_path / "optimizer.lr=0.1")
    assert program.run(["optimizer.lr=0.1", "update=2"]) == DONE
    assert "verdict" in capsys.readouterr().out


def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(tmp_path, monkeypatch)
    for words, told in {
        ("nowhere",): r"run: nowhere does not exist; in .* there are: here",
        ("configs",): "is not the folder of a run",
        (): "give the folder of one run",
        ("here", "there"): "give the folder of one run",
        ("here", "update=0"): "update: '0' is not a number: 1, 2, ...",
        ("here", "update=x"): "update: 'x' is not",
        ("here", "update=31"): "there is no update 31: the run is planned for 30",
        ("here", "update=9", "until=31"): "until: there is no update 31",
        ("here", "update=9", "until=8"): "until: 8 is before update 9",
        ("here", "update=9", "json=maybe"): "json: 'maybe' is not true or false",
        ("here", "update=9", "to=no/where"): "to: there is no folder no",
        ("here", "update=9", "optimizer.lr=1"): "optimizer.lr: this would be another training",
        ("here", "update=9", "optimizer.foo=1"): "optimizer.foo",
        ("here", "update=9", "only=test"): "only",
    }.items():
        assert program.run(words) == WRONG_CONFIG, words
        error = capsys.readouterr().err
        assert re.search(told, error), (words, error)


def test_a_file_of_imports_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_steps.py").write_text("")
    folder = tiny(tmp_path, monkeypatch, "imports=[tests.rigs.tiny,./my_steps.py]")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert program.run([str(folder), "update=3"]) == WRONG_CONFIG
    assert "replay where the run was started" in capsys.readouterr().err


def test_a_run_that_began_with_another_s_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tiny(tmp_path, monkeypatch)
    start = first / "checkpoints" / "update_000000028-1"
    words = ["config=tiny", "run.log_every=1", f"run.resume={start}", "run.dir=second"]
    assert train_here(words) == DONE
    found = replay("second", 30)
    assert Path(found.start) == start and found.logged == 2 and found.differs == ""
    with pytest.raises(CheckpointError, match="update 28 is another run's"):
        replay("second", 28)
    shutil.rmtree(start)
    with pytest.raises(CheckpointError, match="no checkpoint before update 29"):
        replay("second", 29)


def test_the_default_is_the_update_after_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(tmp_path, monkeypatch, "config=tiny", "hooks.tiny_fault={}", code=ERROR)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    assert replay(folder).update == 1


def test_the_trainer_starts_where_it_is_told(tmp_path: Path) -> None:
    from phaseloop.engine.checkpoint import store

    folder = tmp_path / "run"
    r1.train(folder, epochs=1, save={"every_updates": 4})
    saved = next(store.Store(folder / "checkpoints").whole())
    task = r1.make_task(None, epochs=1)
    assert Trainer(task, r1.make_hooks()).train(saved).updates == r1.UPDATES
    assert task.resumed and task.progress.updates == r1.UPDATES
