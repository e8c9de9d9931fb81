"""Hook ``sample_images``: what the model is shown, as a grid of the first batch's images."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phaseloop.engine.cadence import Cadence
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.images import image_grid
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shown import IMAGE
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_AT_LEAST = 32  # pixels that an image is high in the grid, where it can be made larger


@register_hook("sample_images")
class SampleImages(Hook):
    """Images of the first batch, after augmentation, of the training and of each test set.

    Of several micro-batches the first. Recorded as ``samples/PHASE``, and each of several views as
    ``samples/PHASE/0`` and so on; beside it the text ``samples/PHASE/labels`` where targets are
    classes, with predictions where the criterion is a cross entropy. Values from 0 to 1 are shown
    as they are; others are stretched so that the least becomes black and the greatest white.

    Args:
        n: images of a batch, at most.
        key: of the batch, where the images are; None: they are its input.
        every_epochs: again every so many epochs, and in the tests that follow; None: once.
        columns: images in a row.
        scale: pixels on each side that one becomes; None: as many as make small images visible.

    Raises:
        ConfigError: a number below 1; at the first batch: there are no images where they should be.
    """

    only_watches = True

    def __init__(
        self,
        n: int = 16,
        key: str | None = None,
        every_epochs: int | None = None,
        columns: int = 8,
        scale: int | None = None,
    ) -> None:
        for name, number in (("n", n), ("columns", columns), ("scale", scale)):
            if number is not None and number < 1:
                raise ConfigError(f"hooks.sample_images.{name}", f"{number} is below 1")
        self.n = n
        self.key = key
        self.columns = columns
        self.scale = scale
        self._once = every_epochs is None
        self._cadence = Cadence("hooks.sample_images", None, 1 if self._once else every_epochs)
        self._shown = ""  # the name under which the window at hand has them
        self._tested: set[str] = set()  # sets that were shown

    def on_phase_start(self, task: Task) -> None:
        if task.train and not (self._once and task.progress.epoch > 1):
            self._cadence.begin_phase(task)
            if self._cadence.due(task) and task.progress.epoch > 1:
                self._tested = set()

    def on_loss_and_meter(self, task: Task) -> None:
        if not self._missing(task) or task.batch is None or not task.batch.weight:
            return
        # Those of a window that is made again have gone, and are recorded once more.
        if not self._shown or (IMAGE, self._shown) not in task.shown.waiting:
            self._show(task)

    def on_step(self, task: Task) -> None:
        if self._shown and task.accumulator.closed:
            self._shown = ""
            if not task.train:
                self._tested.add(task.phase.name)
            elif task.updated:
                self._cadence.counted()

    def on_phase_end(self, task: Task) -> None:
        if task.primary and self._missing(task):
            log.warning("hooks.%s: there are no images of %s: its step measured no batch, or no "
                        "update counted", self.name, task.phase.name)  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {**self._cadence.state_dict(), "tested": sorted(self._tested)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cadence.load_state_dict(state)
        self._tested = set(state["tested"])

    def _missing(self, task: Task) -> bool:
        if task.train:
            return self._cadence.due(task)
        return task.phase.name not in self._tested

    def _show(self, task: Task) -> None:
        name = f"samples/{task.phase.name}"
        given = self._given(task)
        views = given if isinstance(given, tuple | list) else [given]
        for number, view in enumerate(views):
            self._check(view)
            grid = self._grid(view[: self.n].detach())
            self._shown = name if len(views) == 1 else f"{name}/{number}"
            task.record_image(self._shown, grid)
        if text := self._labels(task):
            task.record_text(f"{name}/labels", text)

    def _given(self, task: Task) -> Any:
        assert task.batch is not None
        if self.key is None:
            return task.batch.input
        data = task.batch.data
        found = data.get(self.key) if isinstance(data, Mapping) else getattr(data, self.key, None)
        if found is None:
            has = f", which has {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
            raise ConfigError(
                f"hooks.{self.name}.key", f"there is no {self.key!r} in the batch{has}"
            )
        return found

    def _check(self, images: Any) -> None:
        if (
            isinstance(images, Tensor)
            and images.dim() == 4
            and images.shape[1] in (1, 3)
            and images.numel()
        ):
            return
        is_what = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        where = "the batch's input" if self.key is None else repr(self.key)
        raise ConfigError(
            f"hooks.{self.name}.key",
            f"images are [N, C, H, W] with C 1 (grey) or 3 (red, green, blue), and {where} is "
            f"{is_what}; name the key of the batch that has them, or leave this hook out",
        )

    def _grid(self, images: Tensor) -> Tensor:
        scale = self.scale or max(1, _AT_LEAST // images.shape[2])
        if images.dtype != torch.uint8:
            images = _shares(images)
        return image_grid(images, columns=self.columns, scale=scale)

    def _labels(self, task: Task) -> str:
        """A table of the targets and what was predicted; empty: targets are no classes."""
        assert task.batch is not None
        target, output = task.batch.target, task.output
        is_class = isinstance(target, Tensor) and target.dim() == 1
        if not is_class or target.is_floating_point() or target.is_complex():
            return ""
        columns = {"target": target[: self.n].tolist()}  # here the host waits for the device
        knows = isinstance(task.criterion_module, nn.CrossEntropyLoss | nn.NLLLoss)
        if knows and task.loss is not None and isinstance(output, Tensor) and output.dim() == 2:
            columns["prediction"] = output[: self.n].argmax(dim=1).tolist()
        rows = [["image", *columns], ["---"] * (1 + len(columns))]
        for number, (right, *said) in enumerate(zip(*columns.values(), strict=True), 1):
            said = [str(value) if value == right else f"**{value}**" for value in said]
            rows.append([str(number), str(right), *said])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shares(images: Tensor) -> Tensor:
    """From 0 to 1, without a look at the values on the host."""
    images = images.to(torch.promote_types(images.dtype, torch.float32))
    low, high = images.amin(), images.amax()
    fits = (low >= 0) & (high <= 1)
    low, high = low.where(~fits, 0.0), high.where(~fits, 1.0)
    return (images - low) / (high - low).where(high > low, 1.0)
