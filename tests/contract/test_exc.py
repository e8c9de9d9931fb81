"""EXC: errors. The first error of user code is what one sees, whatever else goes wrong."""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, NoBatchError, Order, Outcome, Task, Trainer
from phaseloop.engine.checkpoint import store
from phaseloop.engine.run_folder import RunFolder
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, undisturbed

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
