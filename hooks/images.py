"""Hook ``images``: pictures that were recorded, as PNG files in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from torch import Tensor

from phaseloop.engine.disk import flush, make_folder, replace
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shown import IMAGE
from phaseloop.engine.task import Task

_STEM = "update_"


@register_hook("images", default=True)
class Images(Hook):
    """What ``task.record_image(name, image)`` gives: ``images/NAME/update_000000570.png``.

    A picture is on the disk before a checkpoint that comes after it. A resume takes away those
    that were written after its checkpoint, and they are made once more.

    Args:
        folder: name of the folder in the run's folder.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self, folder: str = "images") -> None:
        if not folder or Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ConfigError("hooks.images.folder", f"{folder!r} is no folder in the run's folder")
        self.folder = folder
        self._path: Path | None = None
        self._update = 0
        self._names: list[str] = []  # written at that update

    def on_start(self, task: Task) -> None:
        if task.folder is None or not task.primary:
            return
        self._path = Path(task.folder.path) / self.folder
        task.shown.sinks[IMAGE].append(self._write)
        if not task.resumed_here:
            self._remove(-1, [])

    def on_resume(self, task: Task) -> None:
        if task.resumed_here:
            now = task.progress.updates
            self._remove(now, self._names if self._update == now else [])

    def state_dict(self) -> dict[str, Any]:
        return {"update": self._update, "names": list(self._names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._update, self._names = state["update"], list(state["names"])

    def _write(self, name: str, picture: Tensor, update: int) -> None:
        from PIL import Image

        assert self._path is not None
        if self._update != update:
            self._update, self._names = update, []
        if name not in self._names:
            self._names.append(name)
        path = self._file(name, update)
        make_folder(path.parent)
        values = picture.numpy()
        png = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)

        def save(file: IO[bytes]) -> None:
            png.save(file, format="PNG")

        replace(path, save)
        flush(path.parent)

    def _file(self, name: str, update: int) -> Path:
        assert self._path is not None
        return self._path / name / f"{_STEM}{update:09d}.png"

    def _remove(self, update: int, names: list[str]) -> None:
        """Pictures that came after ``update``, or at it and are not among ``names``."""
        if self._path is None:
            return
        kept = {self._file(name, update) for name in names}
        for path in self._path.rglob(f"{_STEM}*.png"):
            digits = path.stem.removeprefix(_STEM)
            if digits.isdecimal() and int(digits) >= update and path not in kept:
                path.unlink()
