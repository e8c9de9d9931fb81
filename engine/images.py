"""Images: pictures that a step or a hook gives, for hooks such as ``tensorboard`` to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError

if TYPE_CHECKING:
    from phaseloop.engine.backends.base import Backend

Sink = Callable[[str, Tensor, int], None]
"""Called with the name, the picture as uint8 [H, W, C] on the host, and the update."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


class Images:
    """Pictures on their way to those who write them.

    Those of a window wait until it is closed: a checkpoint is never made before, so none can be
    written and then be made again. What belongs to no window is given on at once.

    Attributes:
        sinks: who writes them; empty, and nothing is kept.
        waiting: those of the window at hand, by name.
    """

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.waiting: dict[str, Tensor] = {}

    def add(self, name: str, image: Tensor, lazy: bool = False) -> None:
        """Keep a copy, as uint8 on the image's device; a second one of a name takes its place.

        Args:
            name, image: see :meth:`Task.record_image`.
            lazy: the device is: then all processes keep it, or their programs would not be one.

        Raises:
            ConfigError: no name of files, or no picture.
        """
        _check(name, image)
        if self.sinks or lazy:
            self.waiting[name] = _bytes(image.detach())

    def give(self, update: int, backend: Backend) -> None:
        """To all sinks. Here the host waits for the device."""
        if backend.lazy:  # copying is no part of the step's program
            backend.mark_step()
        names, images = list(self.waiting), list(self.waiting.values())
        self.waiting = {}
        for name, image in zip(names, backend.to_host(images), strict=True):
            picture = image.permute(1, 2, 0).contiguous()
            for sink in self.sinks:
                sink(name, picture, update)

    def drop(self) -> None:
        """The window has come to nothing, or is made again."""
        self.waiting = {}


def image_grid(images: Tensor, columns: int = 8, gap: int = 1, scale: int = 1) -> Tensor:
    """Images [N, C, H, W] as one [C, height, width], row by row; what is left free is 0.

    Args:
        images: of any type.
        columns: images in a row.
        gap: pixels between them, and around all.
        scale: each pixel becomes a square of so many on each side; the gap does not.

    Raises:
        ValueError: not four dimensions, no image, or a number out of range.
    """
    if images.dim() != 4 or not len(images):
        raise ValueError(f"images are [N, C, H, W], N at least 1, not {list(images.shape)}")
    if columns < 1 or gap < 0 or scale < 1:
        raise ValueError(f"columns={columns}, gap={gap}, scale={scale} is out of range")
    large = images.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    n, channels, height, width = large.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    cells = large.new_zeros(rows * columns, channels, height + gap, width + gap)
    cells[:n, :, gap:, gap:] = large
    cells = cells.view(rows, columns, channels, height + gap, width + gap)
    whole = cells.permute(2, 0, 3, 1, 4).reshape(channels, rows * (height + gap), -1)
    return torch.nn.functional.pad(whole, (0, gap, 0, gap))


def _check(name: str, image: Tensor) -> None:
    key = f"record_image({name!r})"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            key, "the name becomes a file's: letters, digits, '_', '-', '.', and '/' between parts"
        )
    if not isinstance(image, Tensor):
        raise ConfigError(key, f"an image is a tensor [C, H, W], not a {type(image).__name__}")
    if image.dim() != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise ConfigError(
            key,
            f"an image is [C, H, W] with C 1 (grey) or 3 (red, green, blue), not "
            f"{list(image.shape)}; image_grid makes one of several",
        )
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise ConfigError(
            key, f"{image.dtype} is neither uint8, 0 to 255, nor floating point, 0 to 1"
        )


def _bytes(image: Tensor) -> Tensor:
    if image.dtype == torch.uint8:
        return image.clone()
    shares = image.float().nan_to_num(nan=0.0).clamp(0, 1)
    return (shares * 255).round().to(torch.uint8)
