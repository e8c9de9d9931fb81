"""Images: what is taken for a picture, and grids of several."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


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


def check(name: str, image: Tensor) -> None:
    """Raises ConfigError where the name is no file's, or the image no picture."""
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


def as_bytes(image: Tensor) -> Tensor:
    """A copy as uint8: shares of 1 become 0 to 255, what lies beyond is cut off."""
    if image.dtype == torch.uint8:
        return image.clone()
    shares = image.float().nan_to_num(nan=0.0).clamp(0, 1)
    return (shares * 255).round().to(torch.uint8)
