"""EXC: errors. The first error of user code is what one sees, whatever else goes wrong."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from phaseloop import (
    ConfigError,
    Data,
    Hook,
    Mix,
    NoBatchError,
    NonFiniteError,
    Order,
    Outcome,
    Task,
    Trainer,
)
from phaseloop.engine.checkpoint import store
from phaseloop.engine.errors import CheckpointError
from phaseloop.engine.run_folder import RunFolder
from phaseloop.hooks.crash import Crash
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, reference, undisturbed
from tests.rigs.probes import SlowWrites

AT = 13
"""The update that breaks."""


class Fuse:
    """Raises at the ``count``-th call."""

    def __init__(self, error: type[BaseException], count: int) -> None:
        self.error = error
        self.left = count

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("the text of it")


class BadStep(Fuse):
    def __call__(self, task: Task) -> None:
        self.burn()
        batch = task.next_batch()
        task.backward(task.criterion(task.forward(batch.input), batch.target))
        task.update()


class BadModel(nn.Sequential):
    def __init__(self, fuse: Fuse) -> None:
        super().__init__(*r1.network())
        self.fuse = fuse

    def forward(self, x: Tensor) -> Tensor:
        self.fuse.burn()
        output: Tensor = super().forward(x)
        return output


class BadLoss(Fuse):
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.burn()
        return nn.functional.cross_entropy(output, target)


class BadSamples(r1.Samples):
    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = fuse

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fuse.burn()
        return super().__getitem__(index)


class BadCollate(Fuse):
    def __call__(self, samples: list[Any]) -> Any:
        self.burn()
        return torch.utils.data.default_collate(samples)


class BadHook(Hook):
    def __init__(self, fuse: Fuse, event: str) -> None:
        self.fuse = fuse
        self.event = event

    def on_backward(self, task: Task) -> None:
        if self.event == "on_backward":
            self.fuse.burn()

    def on_step(self, task: Task) -> None:
        if self.event == "on_step":
            self.fuse.burn()


class Bystander(Hook):
    """Notes how the run ends."""

    order = Order.CHECKPOINT
    saves = True  # only so may it stand behind the checkpoint hook

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_exception(self, task: Task, error: BaseException) -> None:
        self.calls.append(("on_exception", error))

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self.calls.append(("on_end", outcome))


def broken(place: str, error: type[BaseException]) -> dict[str, Any]:
    """Options of a task, and a hook, that break at update ``AT`` in the given place."""
    fuse = Fuse(error, AT)
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: {"train_step": BadStep(error, AT)},
        "forward": lambda: {"model": BadModel(fuse)},
        "loss": lambda: {"criterion": BadLoss(error, AT)},
        "dataset": lambda: {
            "train": Data(BadSamples(Fuse(error, r1.BATCH * (AT - 1) + 1)), r1.BATCH)
        },
        "collate": lambda: {"data": {"collate": BadCollate(error, AT)}},
        "hook": lambda: {"hook": BadHook(fuse, "on_backward")},
        "step hook": lambda: {"hook": BadHook(fuse, "on_step")},
    }
    return options[place]()


NEVER = 10**9
"""An update that no run here comes to."""

PLACES = ("step", "forward", "loss", "dataset", "collate", "hook", "step hook")


def train(folder: Path, hooks: dict[str, Hook], **options: Any) -> Outcome:
    task = r1.make_task(folder, **options)
    save = {"every_updates": 5, "every_epochs": None}
    return Trainer(task, r1.make_hooks(probe_of(folder), save, **hooks)).train()


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *((place, error) for place in PLACES for error in (ValueError, StopIteration)),
        ("loss", KeyboardInterrupt),
        ("dataset", KeyboardInterrupt),
        ("step hook", SystemExit),
    ],
)
def test_exc_a_an_error_in_user_code(
    tmp_path: Path,
    place: str,
    error: type[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, bystander = tmp_path / "run", Bystander()
    options = broken(place, error)
    hooks: dict[str, Hook] = {"bystander": bystander}
    if "hook" in options:
        hooks["hook"] = options.pop("hook")
    with pytest.raises(BaseException) as caught:
        train(folder, hooks, **options)

    chain = [caught.value, caught.value.__cause__]
    (first,) = [link for link in chain if isinstance(link, error)]  # itself, or named as cause
    assert str(first) == "the text of it"
    for said in (capsys.readouterr().out, (folder / "log.txt").read_text()):
        assert error.__name__ in said and "the text of it" in said
        assert "finished" not in said
    assert status(folder)["status"] == "failed"
    assert error.__name__ in status(folder)["reason"]
    assert [name for name, _ in bystander.calls] == ["on_exception", "on_end"]
    assert bystander.calls[0][1] is caught.value
    assert bystander.calls[1][1].status == "failed"

    # Nothing was saved after the error, but where it came between two steps: the state is whole
    # then. Mended, the run goes on from there.
    between = place in ("dataset", "collate") and issubclass(error, Exception)
    if error is not KeyboardInterrupt:  # that does not wait for what is being written
        assert newest(folder).manifest["updates"] == (AT - 1 if between else 10)
    mended = {"train_step": BadStep(error, NEVER)} if place == "step" else {}
    assert train(folder, {}, **mended).status == "finished"
    assert_eq(undisturbed(save={"every_updates": 5, "every_epochs": None}, **mended), folder)


@pytest.mark.parametrize("error", [ValueError, StopIteration])
def test_exc_a_an_error_in_a_worker(tmp_path: Path, error: type[BaseException]) -> None:
    folder = tmp_path / "run"
    data = Data(BadSamples(Fuse(error, 20)), r1.BATCH, workers=2)
    with pytest.raises(Exception, match=r"the text of it|StopIteration"):
        train(folder, {}, train=data)
    assert status(folder)["status"] == "failed"
    assert multiprocessing.active_children() == []


def test_exc_a_a_step_that_takes_too_many_batches(tmp_path: Path) -> None:
    def step(task: Task) -> None:
        task.next_batch()
        task.next_batch()

    with pytest.raises(NoBatchError, match="number 1 of 1"):
        train(tmp_path / "run", {}, train_step=step)


def test_exc_a_an_error_in_a_test_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    task = r1.make_task(tmp_path / "run", test=True)
    hook = r1.At("on_forward", 10, "raise", phase="test")
    task.bare_model[3].eval()  # as a frozen layer would be
    with pytest.raises(r1.ToldError):
        Trainer(task, r1.make_hooks(hook=hook)).train()
    assert [module.training for module in task.bare_model] == [True, True, True, False]
    assert torch.is_grad_enabled()


def test_exc_a_before_the_start_no_hook_hears_of_it(tmp_path: Path) -> None:
    """A hook's end is called if its start was reached, and not otherwise."""
    bystander = Bystander()

    def make(model: nn.Module) -> Any:
        raise ValueError("no optimizer")

    with pytest.raises(ValueError, match="no optimizer"):
        train(tmp_path / "run", {"bystander": bystander}, optimizer=make)
    assert bystander.calls == []


def test_exc_a_a_refused_start_leaves_the_status_of_the_run_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config: dict[str, Any] = {"config": {"optimizer": {"lr": 0.1}}}
    train(folder, {}, **config)
    before = status(folder)
    with pytest.raises(Exception, match=r"optimizer\.lr: 0\.1 -> 0\.2"):
        train(folder, {}, config={"optimizer": {"lr": 0.2}})
    assert status(folder) == before


# --- an error between two steps loses no update; a report of it is left ---


class Corrupt(r1.Samples):
    """One sample cannot be read while the file ``flag`` is not there: the user mends it.

    Attributes:
        met: it was asked for, in this process.
    """

    met = threading.Event()

    def __init__(self, index: int, flag: Path, **options: Any) -> None:
        super().__init__(**options)
        self.index, self.flag = index, flag

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.index and not self.flag.exists():
            Corrupt.met.set()
            raise ValueError("the text of it")
        return super().__getitem__(index)


def corrupt(flag: Path, update: int, place: int = 0, workers: int = 0) -> Data:
    """R1's data, augmented, in which a sample of this update cannot be read."""
    ids = r1.lines(probe_of(reference(augment=True)), "update")[update - 1]["ids"]
    samples = Corrupt(ids[place], flag, augment=True)
    return Data(samples, r1.BATCH, workers=workers, micro_batch_size=2)


@pytest.mark.parametrize(
    ("update", "place", "workers", "saved"),
    [
        (7, 0, 0, 6),
        (7, 0, 2, 6),
        (7, 1, 0, 6),
        (7, 2, 0, 5),  # in the second micro-batch: the window is open, and the state half-moved
        (6, 0, 0, 5),  # nothing has moved since the last save
        (1, 0, 0, 0),
    ],
)
def test_exc_a_a_sample_that_cannot_be_read_loses_no_update(
    tmp_path: Path, update: int, place: int, workers: int, saved: int
) -> None:
    folder, flag = tmp_path / "run", tmp_path / "mended"
    data = corrupt(flag, update, place, workers)
    with pytest.raises(ValueError, match="the text of it"):
        train(folder, {}, train=data)
    there = store.Store(folder / "checkpoints").names()
    assert [store.position(name)[0] for name in there] == ([saved] if saved else [])
    log = (folder / "log.txt").read_text()
    assert ("nothing is lost" in log) == (saved == 6)
    assert status(folder)["status"] == "failed"

    flag.touch()
    assert train(folder, {}, train=data).status == "finished"
    made = [line["update"] for line in r1.lines(probe_of(folder), "update")]
    if saved == update - 1:
        assert made == list(range(1, 31))  # none was made twice
    options = {"augment": True, "data": {"micro_batch_size": 2}, "workers": workers}
    assert_eq(undisturbed(save={"every_updates": 5, "every_epochs": None}, **options), folder)


def test_exc_a_in_a_test_too(tmp_path: Path) -> None:
    folder, flag = tmp_path / "run", tmp_path / "mended"
    options: dict[str, Any] = {"phases": {"test_every_updates": 7}}

    def train_with_it() -> Outcome:
        task = r1.make_task(folder, test=True, **options)
        task.test_data["test"] = Data(Corrupt(5, flag, count=r1.TEST_SAMPLES), r1.BATCH)
        hooks = r1.make_hooks(probe_of(folder), {"every_epochs": None})
        return Trainer(task, hooks).train()

    with pytest.raises(ValueError, match="the text of it"):
        train_with_it()
    assert newest(folder).manifest["updates"] == 7
    flag.touch()
    assert train_with_it().status == "finished"
    made = [line["update"] for line in r1.lines(probe_of(folder), "update")]
    assert made == list(range(1, 31))
    assert_eq(undisturbed(test=True, **options), folder)


class Drawing:
    """Moves a batch to the device, and draws; the seventh time it fails, or a SIGTERM comes."""

    def __init__(self, flag: Path, signal_it: bool) -> None:
        self.flag = flag
        self.signal_it = signal_it
        self.calls = 0

    def __call__(self, data: dict[str, Any], device: torch.device) -> dict[str, Any]:
        self.calls += 1
        shift = 0.1 * (random.random() + torch.rand(4))
        if self.calls == 7 and not self.flag.exists():
            self.flag.touch()
            if self.signal_it:
                os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("the text of it")
        return {**data, "input": data["input"] + shift}


def train_drawing(folder: Path, flag: Path, signal_it: bool) -> str:
    """In a new process."""
    task = r1.make_task(folder, epochs=1, data={"to_device": Drawing(flag, signal_it)})
    hooks = r1.make_hooks(probe_of(folder), {"every_epochs": None})
    try:
        return Trainer(task, hooks).train().status
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("signal_it", "ends"), [(False, "the text of it"), (True, "stopped")])
def test_exc_a_draws_of_a_move_to_the_device_that_broke_off_are_made_again(
    tmp_path: Path, signal_it: bool, ends: str
) -> None:
    whole, folder, flag = tmp_path / "whole", tmp_path / "run", tmp_path / "mended"
    flag.touch()
    assert process.result(train_drawing, whole, flag, signal_it) == "finished"
    flag.unlink()
    assert process.result(train_drawing, folder, flag, signal_it) == ends
    assert newest(folder).manifest["updates"] == 6
    assert process.result(train_drawing, folder, flag, signal_it) == "finished"
    assert_eq(whole, folder)


def test_exc_a_a_save_that_failed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is whole and still there, and the disk may have room again."""
    folder, write, failed = tmp_path / "run", store.Store.write, threading.Event()
    Corrupt.met.clear()

    def fail_once(this: store.Store, name: str, *args: Any) -> store.Saved:
        if name == "update_000000005-1" and not failed.is_set():
            assert Corrupt.met.wait(30)
            failed.set()
            raise CheckpointError("no space, for now")
        return write(this, name, *args)

    monkeypatch.setattr(store.Store, "write", fail_once)
    with pytest.raises(ValueError, match="the text of it"):
        train(folder, {}, train=corrupt(tmp_path / "mended", 6))
    assert failed.is_set()
    assert newest(folder).path.name == "update_000000005-2"
    log = (folder / "log.txt").read_text()
    assert "no space, for now" in log and "nothing is lost" in log


class Refuse(Hook):
    """Finds something wrong with the state before it is saved."""

    def on_start(self, task: Task) -> None:
        def check(_: Task) -> None:
            if task.progress.updates == 6:
                raise NonFiniteError("found by the test")

        task.before_save.append(check)


def test_exc_a_a_state_that_is_refused_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="the text of it"):
        train(folder, {"refuse": Refuse()}, train=corrupt(tmp_path / "mended", 7))
    assert newest(folder).manifest["updates"] == 5
    assert "found by the test" in caplog.text and "nothing is lost" not in caplog.text


def reports(folder: Path) -> dict[str, dict[str, Any]]:
    """By the name of their folder."""
    found = sorted(folder.glob("crash/*/report.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def test_exc_a_a_report_says_what_happened_and_where(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):  # the second is in the same place, and does not overwrite the first
        hooks = {"crash": Crash(weights=True), "broken": r1.At("on_backward", 12, "raise")}
        with pytest.raises(r1.ToldError):
            train(folder, hooks)
    found = reports(folder)
    assert list(found) == ["update_000000012", "update_000000012.2"]
    ids = r1.lines(probe_of(reference()), "update")[12]["ids"]
    for name, report in found.items():
        assert report["error"] == "ToldError" and report["text"] == "on_backward at 12"
        assert "Traceback" in report["traceback"] and "in at" in report["traceback"]
        place = [report[key] for key in ("phase", "epoch", "updates", "batch_of_phase", "rank")]
        assert place == ["train", 2, 12, 2, 0]
        assert report["batches"] == [{"indices": ids, "sources": None, "weight": r1.BATCH}]
        assert report["between_steps"] is False
        weights = torch.load(folder / "crash" / name / "weights.pt", weights_only=True)
        r1.network().load_state_dict(weights)
        assert len(list((folder / "crash" / name).iterdir())) == 2
    # It is no checkpoint, and nothing takes it for one.
    assert newest(folder).manifest["updates"] == 10
    with pytest.raises(ConfigError, match="crash"):
        train(folder, {}, run={"resume": str(folder / "crash" / "update_000000012")})
    assert train(folder, {"crash": Crash()}).status == "finished"
    assert_eq(undisturbed(), folder)


def test_exc_a_a_report_between_two_steps_names_no_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text of it"):
        train(tmp_path / "run", {"crash": Crash()}, train=corrupt(tmp_path / "mended", 7))
    (report,) = reports(tmp_path / "run").values()
    assert report["batches"] == [] and report["between_steps"] is True
    assert report["updates"] == 6


class Unreadable(r1.Samples):
    """Some samples cannot be read."""

    def __init__(self, *indices: int, error: type[Exception] = ValueError) -> None:
        super().__init__()
        self.indices, self.error = indices, error

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.indices:
            raise self.error("the text of it")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError, KeyError, StopIteration])
def test_exc_a_a_report_names_the_sample_that_could_not_be_read(
    tmp_path: Path, workers: int, error: type[Exception]
) -> None:
    folder = tmp_path / "run"
    ids = r1.lines(probe_of(reference()), "update")[6]["ids"]
    data = Data(Unreadable(ids[1], error=error), r1.BATCH, workers=workers)
    with pytest.raises(Exception, match="the text of it") as caught:
        train(folder, {"crash": Crash()}, train=data)
    what = f"sample {ids[1]} of data.train"
    (report,) = reports(folder).values()
    assert report["updates"] == 6 and report["batches"] == []
    assert report["reading"] == {
        "what": what, "set": "data.train", "indices": ids, "sources": None, "sample": ids[1],
    }  # fmt: skip
    assert f"(while reading {what})" in (folder / "log.txt").read_text()
    shown = "".join(traceback.format_exception(caught.value))
    assert (f"while reading {what}" in shown) == (sys.version_info >= (3, 11))


@pytest.mark.parametrize("workers", [0, 1])
def test_exc_a_of_a_mix_the_source_is_named_and_of_a_list_all_samples(
    tmp_path: Path, workers: int
) -> None:
    class Lists(r1.Samples):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise ValueError("the text of it")

    mix = Mix({"good": r1.Samples(), "bad": Unreadable(*range(r1.SAMPLES))})
    for name, dataset in (("mix", mix), ("lists", Lists())):
        with pytest.raises(ValueError, match="the text of it"):
            train(
                tmp_path / name, {"crash": Crash()}, train=Data(dataset, r1.BATCH, workers=workers)
            )
    (report,) = reports(tmp_path / "mix").values()
    reading = report["reading"]
    first = reading["sources"].index("bad")
    assert reading["sample"] == reading["indices"][first]
    assert reading["what"] == f"sample {reading['sample']} of data.train.mix.bad"
    assert set(reading["sources"][:first]) <= {"good"}
    (report,) = reports(tmp_path / "lists").values()
    ids = r1.lines(probe_of(reference()), "update")[0]["ids"]
    assert report["reading"]["indices"] == ids and report["reading"]["sample"] is None
    assert report["reading"]["what"] == f"samples {', '.join(map(str, ids))} of data.train"


class BrokenStream(IterableDataset[Any]):
    """Its sixth sample cannot be read."""

    def __iter__(self) -> Any:
        samples = r1.Samples()
        for index in range(5):
            yield samples[index]
        raise ValueError("the text of it")


@pytest.mark.parametrize("workers", [0, 1])
def test_exc_a_of_a_stream_it_is_said_how_much_came_before(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "run"
    data = Data(BrokenStream(), 2, workers=workers)
    with pytest.raises(ValueError, match="the text of it"):
        train(folder, {"crash": Crash()}, train=data)
    (report,) = reports(folder).values()
    by = " by worker 0" if workers else ""
    what = f"data.train in epoch 1, after 5 samples{by}"
    assert report["reading"] == {
        "what": what, "set": "data.train", "epoch": 1, "count": 5, "worker": 0 if workers else None,
    }  # fmt: skip
    assert f"while reading {what}" in (folder / "log.txt").read_text()


def test_exc_a_a_report_of_a_window_names_all_its_samples(tmp_path: Path) -> None:
    class Step:
        takes = "window"

        def __call__(self, task: Task) -> None:
            for batch in task.window():
                task.backward(task.criterion(task.forward(batch.input), batch.target))
            raise ValueError("at its end")

    with pytest.raises(ValueError, match="at its end"):
        train(
            tmp_path / "run", {"crash": Crash()},
            train_step=Step(), data={"micro_batch_size": 2},
        )  # fmt: skip
    (report,) = reports(tmp_path / "run").values()
    ids = r1.lines(probe_of(reference()), "update")[0]["ids"]
    assert [batch["indices"] for batch in report["batches"]] == [ids[:2], ids[2:]]


def test_exc_a_no_report_where_the_user_left_or_the_configuration_is_wrong(tmp_path: Path) -> None:
    class Wrong(Hook):
        def on_start(self, task: Task) -> None:
            raise ConfigError("hooks.wrong", "is wrong")

    for number, (hook, error) in enumerate(
        [
            (Wrong(), ConfigError),
            (BadHook(Fuse(KeyboardInterrupt, 3), "on_step"), KeyboardInterrupt),
        ]
    ):
        with pytest.raises(error):
            train(tmp_path / str(number), {"crash": Crash(), "hook": hook})
        assert not (tmp_path / str(number) / "crash").exists()


def test_exc_a_an_error_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    folder, slow = tmp_path / "run", SlowWrites(0.2)
    hooks = {"slow": slow, "broken": r1.At("on_step", 11, "raise", in_flight=True)}
    with pytest.raises(r1.ToldError):
        train(folder, hooks)
    assert newest(folder).manifest["updates"] == 10
    assert "saved update_000000010-1" in (folder / "log.txt").read_text()


# --- EXC-c: errors while ending ---


class Faulty(Hook):
    """Raises at the run's end too."""

    saves = True  # only so may it stand behind the checkpoint hook

    def __init__(self, order: int, *events: str, error: type[BaseException] = RuntimeError) -> None:
        self.order = order  # type: ignore[misc]
        self.events = events
        self.error = error

    def on_exception(self, task: Task, error: BaseException) -> None:
        self._raise("on_exception")

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._raise("on_end")

    def _raise(self, event: str) -> None:
        if event in self.events:
            raise self.error(f"{self.name} in {event}")


EARLY, LATE = Order.SYNC_METERS, Order.CHECKPOINT
BOTH = ("on_exception", "on_end")


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, KeyboardInterrupt])
def test_exc_c_errors_while_ending_hide_neither_the_first_nor_the_others(
    tmp_path: Path, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    folder, bystander = tmp_path / "run", Bystander()
    hooks: dict[str, Hook] = {
        "early": Faulty(EARLY, *BOTH, error=error),
        "broken": r1.At("on_step", 13, "raise"),
        "bystander": bystander,
        "late": Faulty(LATE, *BOTH, error=error),
    }
    with caplog.at_level(logging.INFO), pytest.raises(r1.ToldError, match="on_step at 13"):
        train(folder, hooks)
    assert [name for name, _ in bystander.calls] == ["on_exception", "on_end"]
    assert isinstance(bystander.calls[0][1], r1.ToldError)
    for hook in ("early", "late"):
        for event in BOTH:
            assert f"{hook} in {event}" in caplog.text
    assert status(folder)["status"] == "failed"
    assert "ToldError" in status(folder)["reason"]
    assert newest(folder).manifest["updates"] == 10


def test_exc_c_an_error_at_the_end_of_a_good_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails the run, but takes nothing of it: every hook is called and all is saved."""
    folder, bystander = tmp_path / "run", Bystander()
    hooks: dict[str, Hook] = {
        "early": Faulty(EARLY, "on_end"),
        "bystander": bystander,
        "late": Faulty(LATE, "on_end"),
    }
    with pytest.raises(RuntimeError, match="early in on_end"):
        train(folder, hooks)
    assert "late in on_end" in caplog.text
    assert [name for name, _ in bystander.calls] == ["on_end"]
    assert newest(folder).manifest["updates"] == 30
    assert status(folder)["status"] == "failed"
    assert "early in on_end" in status(folder)["reason"]
    assert train(folder, {}).status == "finished"  # nothing is left to do
    assert store.Store(folder / "checkpoints").names() == [newest(folder).path.name]


def open_folder(folder: Path) -> None:
    """In another process: take the run's folder, if nobody holds it."""
    RunFolder(folder).open()


def test_exc_c_the_process_is_as_it_was(tmp_path: Path) -> None:
    """Settings, handlers and the lock are given back whatever happens."""
    before = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
              list(logging.getLogger("phaseloop").handlers)]  # fmt: skip
    for _ in range(2):
        with pytest.raises(r1.ToldError):
            train(tmp_path / "run", {"a": r1.At("on_step", 3, "raise"), "b": Faulty(LATE, *BOTH)})
        after = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
                 list(logging.getLogger("phaseloop").handlers)]  # fmt: skip
        assert after == before
        process.result(open_folder, tmp_path / "run")
