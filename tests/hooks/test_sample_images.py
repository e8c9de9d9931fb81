"""Hook ``sample_images``: the images that the model was shown, once, with what it made of them."""

from __future__ import annotations

import io
import logging
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from phaseloop import ConfigError, Data, Hook, Trainer
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.images import Images
from phaseloop.hooks.sample_images import SampleImages
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import events, process, r1


class Pictures(Dataset[Any]):
    """Grey images of 2 by 2 pixels, shares of 255, with their sums above 2 as the class.

    Args:
        augment: each read adds up to a tenth.
        form: ``pair``, ``mapping`` (the images under ``picture``), ``views`` (two of each).
    """

    def __init__(self, count: int = 40, augment: bool = False, form: str = "pair") -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randint(0, 200, (count, 1, 2, 2), generator=generator) / 255
        self.y = (self.x.sum(dim=(1, 2, 3)) > 1.6).long()
        self.augment = augment
        self.form = form

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        if self.augment:
            x = x + random.random() / 10
        if self.form == "mapping":
            return {"input": x.flatten(), "target": y, "picture": x * 8 - 4}
        return ([x, 1 - x], y) if self.form == "views" else (x, y)


class Flat(nn.Module):
    """R1's network on images, or on the first of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.body = r1.network()

    def forward(self, x: Any) -> Tensor:
        x = x[0] if isinstance(x, list) else x
        return self.body(x.flatten(1))


class Watch(Hook):
    """Keeps the first batch's input, target and output of each phase."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], tuple[Any, Tensor, Tensor]] = {}

    def on_forward(self, task: Any) -> None:
        key = task.phase.name, task.progress.epoch
        self.seen.setdefault(key, (task.batch.input, task.batch.target, task.output.detach()))


def make_task(
    folder: Path | None, form: str = "pair", augment: bool = False, **options: Any
) -> Any:
    train = Data(Pictures(augment=augment, form=form), 4, **options.pop("data", {}))
    test = {"test": Data(Pictures(6, form=form), 4), "other": Data(Pictures(5, form=form), 4)}
    options = {"epochs": 2, "train": train, "test": test, "model": Flat(), **options}
    return r1.make_task(folder, **options)


def run(folder: Path | None, hook: SampleImages, task: Any = None, **hooks: Hook) -> Watch:
    watch = Watch()
    hooks = {"samples": hook, "watch": watch, "images": Images(), **hooks}
    board = {"tensorboard": TensorBoard()}
    Trainer(task or make_task(folder), r1.make_hooks(**{**board, **hooks})).train()
    return watch


def tiles(png: bytes | Path, size: int = 2, scale: int = 16) -> np.ndarray:
    """The images of a grid in which nothing is left free, [N, size, size], as bytes."""
    file = io.BytesIO(png) if isinstance(png, bytes) else png
    pixels = np.asarray(Image.open(file).convert("L"))[1:, 1:]
    step = size * scale + 1
    rows, columns = pixels.shape[0] // step, pixels.shape[1] // step
    cells = pixels.reshape(rows, step, columns, step).transpose(0, 2, 1, 3)
    return cells.reshape(-1, step, step)[:, : step - 1 : scale, : step - 1 : scale]


def samples(folder: Path) -> dict[str, list[int]]:
    """Tag to the updates at which it has an image or a text."""
    found = events.everything(folder)
    return {t: [step for step, _ in v] for t, v in found.items() if t.startswith("samples/")}


def as_bytes(images: Tensor) -> np.ndarray:
    return (images[:, 0] * 255).round().to(torch.uint8).numpy()


def test_the_first_batch_of_each_set_as_the_model_was_given_it(tmp_path: Path) -> None:
    watch = run(tmp_path, SampleImages(), make_task(tmp_path, augment=True))
    once = {"train": 1, "test": 10, "other": 10}
    assert samples(tmp_path) == {
        f"samples/{name}{more}": [update]
        for name, update in once.items()
        for more in ("", "/labels")
    }
    board = events.everything(tmp_path)
    for name, update in once.items():
        given = as_bytes(watch.seen[name, 1][0])
        assert len(given) == 4
        assert (tiles(board[f"samples/{name}"][0][1]) == given).all()
        png = tmp_path / f"images/samples/{name}/update_{update:09d}.png"
        assert (tiles(png) == given).all()
    # Augmented: what the data set holds is other than what was shown.
    assert not np.isin(as_bytes(watch.seen["train", 1][0]), as_bytes(Pictures().x)).all()


def test_beside_it_stand_targets_and_what_was_predicted(tmp_path: Path) -> None:
    watch = run(tmp_path, SampleImages(n=3))
    ((_, text),) = events.everything(tmp_path)["samples/test/labels"]
    _, target, output = watch.seen["test", 1]
    rows = ["| image | target | prediction |", "| --- | --- | --- |"]
    for number, (right, guess) in enumerate(zip(target[:3], output.argmax(1)[:3], strict=True), 1):
        said = int(guess) if guess == right else f"**{int(guess)}**"
        rows.append(f"| {number} | {int(right)} | {said} |")
    assert text.splitlines() == rows


def test_again_every_other_epoch_and_in_the_tests_that_follow(tmp_path: Path) -> None:
    run(tmp_path, SampleImages(every_epochs=2), make_task(tmp_path, epochs=4))
    found = samples(tmp_path)
    assert found["samples/train"] == found["samples/train/labels"] == [1, 21]
    assert found["samples/test"] == found["samples/other/labels"] == [10, 30]


def test_values_beyond_shares_are_stretched(tmp_path: Path) -> None:
    task = make_task(tmp_path, form="mapping", model=r1.network(), data={"shuffle": False})
    run(tmp_path, SampleImages(key="picture", scale=16), task)
    ((_, png),) = events.everything(tmp_path)["samples/train"]
    x = Pictures().x[:4]
    low, high = x.min(), x.max()
    assert (tiles(png) == as_bytes((x - low) / (high - low))).all()


def test_each_of_several_views(tmp_path: Path) -> None:
    watch = run(tmp_path, SampleImages(), make_task(tmp_path, form="views"))
    board = events.everything(tmp_path)
    for number, view in enumerate(watch.seen["train", 1][0]):
        ((_, png),) = board[f"samples/train/{number}"]
        assert (tiles(png) == as_bytes(view)).all()


def test_what_is_no_image_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.samples\.key.*the batch's input is \[4, 4\]"):
        run(tmp_path / "a", SampleImages(), r1.make_task(tmp_path / "a", epochs=1))
    with pytest.raises(
        ConfigError, match=r"no 'image' in the batch, which has input, target, index"
    ):
        run(tmp_path / "b", SampleImages(key="image"), r1.make_task(tmp_path / "b", epochs=1))


@pytest.mark.parametrize("options", [{"n": 0}, {"columns": 0}, {"scale": 0}, {"every_epochs": 0}])
def test_numbers_below_one_are_refused(options: Any) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"hooks\.sample_images\.{name}.*below 1"):
        SampleImages(**options)


class SkipFirst(Hook):
    """Leaves out the first window."""

    def on_gradients(self, task: Any) -> None:
        if task.progress.windows == 0:
            task.skip_update("asked for by the test")


def test_where_the_first_update_is_left_out_the_next_is_shown(tmp_path: Path) -> None:
    run(tmp_path, SampleImages(), skip=SkipFirst())
    assert samples(tmp_path)["samples/train"] == [1]


class TooMuch(nn.Module):
    """Out of memory where it gets more than two samples, once it has made its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if len(target) > 2 and output.requires_grad:
            output.register_hook(self._full)
        return self.loss(output, target)

    @staticmethod
    def _full(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("too many samples")


def test_a_window_that_is_made_again_is_shown_as_it_counts(tmp_path: Path) -> None:
    task = make_task(tmp_path, criterion=TooMuch())
    watch = run(tmp_path, SampleImages(), task, fit=FitMemory())
    ((_, png),) = events.everything(tmp_path)["samples/train"]
    assert (tiles(png) == as_bytes(watch.seen["train", 1][0][:2])).all()  # the first micro-batch


def test_a_step_that_measures_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(task: Any) -> None:
        batch = task.next_batch()
        if task.train:
            task.backward(nn.functional.cross_entropy(task.model(batch.input), batch.target))
            task.update()

    with caplog.at_level(logging.WARNING):
        run(tmp_path, SampleImages(), make_task(tmp_path, train_step=silent, epochs=1))
    assert "hooks.samples: there are no images of train" in caplog.text


def train(folder: Path, at: Any = None, save: Any = None) -> dict[str, Any]:
    hooks = {
        "samples": SampleImages(every_epochs=2), "images": Images(), "tensorboard": TensorBoard(),
        **({} if at is None else {"at": at}),
    }  # fmt: skip
    task = make_task(folder, epochs=3, augment=True)
    return vars(Trainer(task, r1.make_hooks(save=save, **hooks)).train())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "run"
    process.result(train, folder)
    return folder


@pytest.mark.parametrize(
    ("every", "at"),
    [
        (7, r1.At("on_update", 0)), (1, r1.At("on_step", 1)),
        (7, r1.At("on_phase_end", 10, phase="test")), (1, r1.At("on_forward", 10, phase="other")),
        (7, r1.At("on_step", 21)),
    ],
    ids=["in update 1", "after update 1", "between tests", "in a test", "after update 21"],
)  # fmt: skip
def test_killed_and_resumed_each_is_there_once(
    undisturbed: Path, tmp_path: Path, every: int, at: Any
) -> None:
    folder, save = tmp_path / "run", {"every_updates": every}
    assert process.run(train, folder, at, save).code == -signal.SIGKILL
    process.result(train, folder, save=save)
    assert events.everything(folder) == events.everything(undisturbed)
    kept = [sorted(p.name for p in f.rglob("images/**/*.png")) for f in (folder, undisturbed)]
    assert kept[0] == kept[1] and len(kept[0]) == 6


def test_it_changes_nothing_of_the_training(tmp_path: Path) -> None:
    weights = []
    for hook in (SampleImages(every_epochs=1), None):
        task = make_task(tmp_path / str(len(weights)), augment=True)
        Trainer(task, r1.make_hooks(**({} if hook is None else {"samples": hook}))).train()
        weights.append(torch.cat([p.detach().flatten() for p in task.bare_model.parameters()]))
    assert torch.equal(*weights)
