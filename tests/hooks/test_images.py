"""Images: what a step or hook gives is there once, as PNG and in TensorBoard, after kills too."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from phaseloop import ConfigError, Hook, PhaseloopError, Trainer
from phaseloop.hooks.fit_memory import FitMemory
from phaseloop.hooks.images import Images
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import process, r1
from tests.rigs.equal import differences, newest, state_of

EVERY_10 = {"every_epochs": None, "every_updates": 10}
"""Checkpoints at updates 10 and 20: after their own images, before those of the phase's end."""


class Paint(Hook):
    """Records a picture of the model's bias in and outside steps, in train phases and tests."""

    def on_update(self, task: Any) -> None:
        if task.progress.updates % 2:  # this is an even update, not counted yet
            task.record_image("in/step", self.picture(task))

    def on_step(self, task: Any) -> None:
        if task.updated and task.progress.updates % 5 == 0:
            task.record_image("after_step", self.picture(task))

    def on_forward(self, task: Any) -> None:
        if not task.train:
            task.record_image("in_test", self.picture(task))

    def on_phase_start(self, task: Any) -> None:
        task.record_image(f"{task.phase.name}/start", self.picture(task))

    def on_phase_end(self, task: Any) -> None:
        task.record_image(f"{task.phase.name}/end", self.picture(task))

    @staticmethod
    def picture(task: Any) -> torch.Tensor:
        """Of 3 by 2 by 4 pixels, another after each update."""
        first = next(iter(task.bare_model.parameters())).detach()
        return torch.stack([first[:2, :4], first[2:4, :4], first[4:6, :4]]) * 3 + 0.5


def train(folder: Path, save: Any = None, at: Any = None, **options: Any) -> Any:
    """Two epochs of 10 updates, each with a test, in a new process."""
    hooks = {"paint": Paint(), "images": Images(), "tensorboard": TensorBoard()}
    if at is not None:
        hooks["at"] = at
    settings = {"epochs": 2, "test": True, **options}
    return process.run(r1.train, folder, save=save, hooks=hooks, **settings)


def files(folder: Path) -> dict[tuple[str, int], bytes]:
    """Name and update to the pixels of the PNG."""
    root = folder / "images"
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            name = str(path.parent.relative_to(root))
            found[name, int(path.stem.removeprefix("update_"))] = pixels(path.read_bytes())
    return found


def shown(folder: Path) -> list[tuple[str, int, bytes]]:
    """Name, update and pixels of what TensorBoard shows, one by one."""
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    board.Reload()
    return sorted(
        (tag, event.step, pixels(event.encoded_image_string))
        for tag in board.Tags()["images"]
        for event in board.Images(tag)
    )


def pixels(png: bytes) -> bytes:
    image = Image.open(io.BytesIO(png))
    return f"{image.size} {image.mode} ".encode() + np.asarray(image).tobytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("images") / "run"
    assert train(folder).code == 0
    return folder


def test_every_picture_is_there_under_its_update(undisturbed: Path) -> None:
    ends = [10, 20]
    wanted = {
        "in/step": list(range(2, 21, 2)),
        "after_step": [5, 10, 15, 20],
        "in_test": ends,
        "train/start": [0, 10],
        "train/end": ends,
        "test/start": ends,
        "test/end": ends,
    }
    assert set(files(undisturbed)) == {(name, k) for name in wanted for k in wanted[name]}


def test_tensorboard_shows_the_same_pictures(undisturbed: Path) -> None:
    found = [(name, update, picture) for (name, update), picture in files(undisturbed).items()]
    assert shown(undisturbed) == sorted(found)


@pytest.mark.parametrize("save", [EVERY_10, None], ids=["by updates", "by epochs"])
@pytest.mark.parametrize(
    "at",
    [
        r1.At("on_update", 13),
        r1.At("on_step", 14),
        r1.At("on_forward", 10, phase="test"),
        r1.At("on_phase_end", 10, phase="test"),
        r1.At("on_phase_end", 20, phase="test"),
    ],
    ids=["in update 14", "after update 14", "in a test", "after a test", "at the end"],
)
def test_killed_and_resumed_each_is_there_once(
    undisturbed: Path, tmp_path: Path, save: Any, at: Any
) -> None:
    folder = tmp_path / "run"
    assert train(folder, save, at).code == -signal.SIGKILL
    assert train(folder, save).code == 0
    assert files(folder) == files(undisturbed)
    assert shown(folder) == shown(undisturbed)
    assert not [line for line in differences(undisturbed, folder) if "hooks.images" in line]


def test_pictures_after_the_checkpoint_go_where_they_are_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save = {"every_epochs": None, "every_updates": 4}
    assert train(folder, save, r1.At("on_step", 7)).code == -signal.SIGKILL
    assert ("after_step", 5) in files(folder)
    own = folder / "images" / "mine.png"
    own.write_bytes((folder / "images/after_step/update_000000005.png").read_bytes())
    process.result(r1.train, folder, save=save, hooks={"images": Images()}, epochs=1)
    left = {name for name in folder.rglob("images/**/*.png") if name != own}
    assert {path.stem for path in left} == {f"update_{k:09d}" for k in (0, 2, 4)}
    assert own.exists()  # what the hook has not written is not its own


def test_killed_before_any_checkpoint_the_next_run_begins_anew(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder, EVERY_10, r1.At("on_step", 7))
    train(folder, EVERY_10)
    assert files(folder) == files(undisturbed)


def test_a_skipped_update_leaves_no_picture_and_the_next_one_has_its_number(tmp_path: Path) -> None:
    class Skip(r1.SkipSome):
        def on_backward(self, task: Any) -> None:
            task.record_image("try", torch.full((1, 1, 1), task.progress.windows / 10))

    hooks = {"skip": Skip(), "images": Images()}
    Trainer(r1.make_task(tmp_path, epochs=1), hooks).train()
    # Windows 0 to 9, of which 2 and 6 are skipped: window 3 makes update 3, and 7 update 6.
    grey = {update: picture[-1] for (_, update), picture in files(tmp_path).items()}
    windows = [w for w in range(10) if w not in (2, 6)]
    assert grey == {k: round(255 * w / 10) for k, w in enumerate(windows, 1)}


class OneMicroBatch(Hook):
    """Records at each micro-batch; the second of the window runs out of memory at first."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_forward(self, task: Any) -> None:
        self.seen.append(task.batch.size)
        task.record_image(f"size_{task.batch.size}", torch.zeros(1, 1, 1))
        if self.seen == [2, 2]:
            raise torch.OutOfMemoryError("the test says so")


def test_a_window_that_is_made_again_leaves_only_its_second_attempt(tmp_path: Path) -> None:
    task = r1.make_task(tmp_path, epochs=1, data={"micro_batch_size": 2})
    probe = OneMicroBatch()
    hooks = {"fit_memory": FitMemory(), "probe": probe, "images": Images()}
    Trainer(task, hooks).train()
    assert probe.seen[:4] == [2, 2, 1, 1]
    assert {name for name, _ in files(tmp_path)} == {"size_1"}


def test_of_two_with_one_name_the_later_stands(tmp_path: Path) -> None:
    class Twice(Hook):
        def on_phase_end(self, task: Any) -> None:
            for grey in (0.2, 0.6):
                task.record_image("twice", torch.full((1, 2, 2), grey))

    hooks = {"twice": Twice(), "images": Images(), "tensorboard": TensorBoard()}
    Trainer(r1.make_task(tmp_path, epochs=1), hooks).train()
    ((name, update, picture),) = shown(tmp_path)
    assert (name, update) == ("twice", 10) and set(picture[-4:]) == {round(0.6 * 255)}
    assert files(tmp_path)["twice", 10][-4:] == picture[-4:]


def test_nothing_recorded_nothing_made(tmp_path: Path) -> None:
    process.result(r1.train, tmp_path / "run", epochs=1, hooks={"images": Images()})
    assert not (tmp_path / "run/images").exists()
    assert state_of(newest(tmp_path / "run"))["hooks"]["images"] == {"update": 0, "names": []}


def test_only_the_primary_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = r1.make_task(tmp_path, epochs=1)
    monkeypatch.setattr(type(task), "primary", property(lambda self: False))
    Trainer(task, {"paint": Paint(), "images": Images(), "tensorboard": TensorBoard()}).train()
    assert not (tmp_path / "images").exists() and not task.shown.waiting


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Trainer(r1.make_task(None, epochs=1), {"paint": Paint(), "images": Images()}).train()
    assert list(tmp_path.iterdir()) == []


def test_before_the_first_phase_it_is_an_error(tmp_path: Path) -> None:
    class Early(Hook):
        def on_start(self, task: Any) -> None:
            task.record_image("early", torch.zeros(1, 1, 1))

    with pytest.raises(PhaseloopError, match="on_phase_start"):
        Trainer(r1.make_task(tmp_path, epochs=1), {"early": Early()}).train()


@pytest.mark.parametrize("folder", ["", "/tmp/pictures", "../pictures"])
def test_the_folder_is_in_the_runs(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.images\.folder"):
        Images(folder)
