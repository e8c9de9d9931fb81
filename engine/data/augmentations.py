"""Augmentations: images changed at random, a whole micro-batch at once, on the device.

An augmentation is called as ``augment(images, draws)``: ``images`` float [B, C, H, W], ``draws``
the random numbers of these samples. It gives images of the same form and writes to none. Nothing is
read from the device, and what becomes of a sample depends on its own draws alone. Images of half
precision are worked on in float32, since such numbers do not tell the places of a pixel apart.

Here are those that move pixels; those that change their values are in ``colours.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from phaseloop.engine.data.augment import Draws
from phaseloop.engine.data.augmenting import (
    at_times,
    check_images,
    check_range,
    check_share,
    widened,
)
from phaseloop.engine.registry import register_augmentation

_PADDING = ("zeros", "border", "reflection")


@register_augmentation("affine")
class Affine:
    """Turns, scales, shears and shifts each image about its middle, by bilinear interpolation.

    Args:
        rotate: largest angle, degrees to either side.
        scale: least and largest magnification, drawn evenly on a logarithmic scale.
        shear: largest angle by which upright lines lean, degrees to either side.
        shift: largest shift down and across, as a share of the image's side, 0 to 1.
        padding: what comes in from outside: ``zeros``, ``border`` or ``reflection``.
        probability: of changing an image at all.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        rotate: float = 0.0,
        scale: Sequence[float] = (1.0, 1.0),
        shear: float = 0.0,
        shift: float = 0.0,
        padding: str = "zeros",
        probability: float = 1.0,
    ) -> None:
        if not 0 <= rotate <= 180:
            raise ValueError(f"rotate is {rotate}, but must be from 0 to 180 degrees")
        if not 0 <= shear < 90:
            raise ValueError(f"shear is {shear}, but must be from 0 to below 90 degrees")
        check_share("shift", shift)
        if padding not in _PADDING:
            raise ValueError(f"padding is {padding!r}, but must be one of {', '.join(_PADDING)}")
        self.rotate = math.radians(rotate)
        self.scale = check_range("scale", scale, above=0.0)
        self.shear = math.radians(shear)
        self.shift = shift
        self.padding = padding
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        turn, lean, down, across = (2 * draws.uniform(4).to(given) - 1).unbind(1)
        size = _between_logs(draws.uniform().to(given), self.scale)
        angle, slope = self.rotate * turn, torch.tan(self.shear * lean)
        cosine, sine = torch.cos(angle) / size, torch.sin(angle) / size
        height, width = images.shape[-2:]
        # Where each pixel comes from, in pixels from the middle, each side being 2 long.
        rows = torch.stack(
            [
                torch.stack([cosine, (cosine * slope - sine) * (height / width)], 1),
                torch.stack([sine * (width / height), sine * slope + cosine], 1),
            ],
            1,
        )
        shift = 2 * self.shift * torch.stack([across, down], 1)
        moved = resampled(given, rows, shift, self.padding)
        return at_times(self.probability, moved, images, draws)


@register_augmentation("resized_crop")
class ResizedCrop:
    """Cuts a box out of each image and enlarges it to the image's size.

    Source: Szegedy et al., "Going deeper with convolutions", 2015, section 6; with SimCLR's area.

    Args:
        area: least and largest share of the image's area.
        ratio: least and largest width / height, both in pixels, drawn evenly on a logarithmic
            scale; a box that would not fit is as wide or as high as the image.
        probability: of cutting an image at all.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        area: Sequence[float] = (0.2, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        probability: float = 1.0,
    ) -> None:
        self.area = check_range("area", area, above=0.0, most=1.0)
        self.ratio = check_range("ratio", ratio, above=0.0)
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        share, slim = box(self.area, self.ratio, given, draws)
        height, width = (share / slim).sqrt().clamp(max=1), (share * slim).sqrt().clamp(max=1)
        down, across = (2 * draws.uniform(2).to(given) - 1).unbind(1)
        middle = torch.stack([(1 - width) * across, (1 - height) * down], 1)
        nothing = torch.zeros_like(width)
        rows = torch.stack([torch.stack([width, nothing], 1), torch.stack([nothing, height], 1)], 1)
        cut = resampled(given, rows, middle, "border")
        return at_times(self.probability, cut, images, draws)


@register_augmentation("shift")
class Shift:
    """Moves each image by whole pixels; what comes in is 0.

    Args:
        pixels: the largest shift, down and across.

    Raises:
        ValueError: pixels is less than 0.
    """

    def __init__(self, pixels: int) -> None:
        if pixels < 0:
            raise ValueError(f"pixels is {pixels}, but must be at least 0")
        self.pixels = pixels

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        check_images(images)
        height, width = images.shape[-2:]
        padded = F.pad(images, (self.pixels,) * 4)
        start = (draws.uniform(2) * (2 * self.pixels + 1)).long()
        down = start[:, 0, None] + torch.arange(height, device=images.device)
        across = start[:, 1, None] + torch.arange(width, device=images.device)
        samples = torch.arange(len(images), device=images.device)[:, None, None]
        return padded[samples, :, down[:, :, None], across[:, None, :]].movedim(-1, 1).contiguous()


@register_augmentation("flip")
class Flip:
    """Mirrors images, left to right.

    Args:
        probability: of mirroring an image.
        vertical: top to bottom instead.

    Raises:
        ValueError: probability is not a share.
    """

    def __init__(self, probability: float = 0.5, vertical: bool = False) -> None:
        self.probability = check_share("probability", probability)
        self.dim = -2 if vertical else -1

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        check_images(images)
        return at_times(self.probability, images.flip(self.dim), images, draws)


@register_augmentation("erase")
class Erase:
    """Overwrites a box in each image with one value.

    Source: Zhong et al., "Random Erasing Data Augmentation", AAAI 2020, algorithm 1: the box lies
    inside the image. Its sides are rounded to whole pixels, at least one.

    Args:
        area: least and largest share of the image's area.
        ratio: least and largest width / height, both in pixels, drawn evenly on a logarithmic
            scale. Where the box would not fit the nearest ratio is taken with which it does; the
            algorithm draws again.
        value: what is written.
        probability: of erasing in an image at all.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        area: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float = 0.0,
        probability: float = 0.5,
    ) -> None:
        self.area = check_range("area", area, above=0.0, most=1.0)
        self.ratio = check_range("ratio", ratio, above=0.0)
        self.value = value
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        share, slim = box(self.area, self.ratio, given, draws)
        slim = torch.maximum(share, torch.minimum(slim, 1 / share))  # both sides are at most 1
        down, across = draws.uniform(2).to(given).unbind(1)
        inside_y = _span((share / slim).sqrt(), down, images.shape[-2])
        inside_x = _span((share * slim).sqrt(), across, images.shape[-1])
        inside = inside_y[:, None, :, None] & inside_x[:, None, None, :]
        return at_times(self.probability, images.masked_fill(inside, self.value), images, draws)


def resampled(images: Tensor, rows: Tensor, shift: Tensor, padding: str) -> Tensor:
    """Each pixel p, from -1 to 1 on each side, is taken from ``rows @ p + shift``.

    Args:
        rows: [B, 2, 2], across before down.
        shift: [B, 2], likewise.
    """
    y, x = (_middles(size, images) for size in images.shape[-2:])
    # By hand, since a matrix product may round by the size of the batch.
    across, down = (
        rows[:, i, 0, None, None] * x + rows[:, i, 1, None, None] * y[:, None]
        + shift[:, i, None, None]
        for i in (0, 1)
    )  # fmt: skip
    places = torch.stack([across, down], dim=-1)
    return F.grid_sample(images, places, padding_mode=padding, align_corners=False)


def box(
    area: tuple[float, float], ratio: tuple[float, float], images: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """A box for each image: its share of the image's area, and its width / height, [B] each.

    Args:
        ratio: of pixels; the width / height given back is that of shares of the image's sides.
    """
    place, shape = draws.uniform(2).to(images).unbind(1)
    share = area[0] + (area[1] - area[0]) * place
    height, width = images.shape[-2:]
    return share, _between_logs(shape, ratio) * (height / width)


def _between_logs(draw: Tensor, ends: tuple[float, float]) -> Tensor:
    low, high = (math.log(end) for end in ends)
    return torch.exp(low + (high - low) * draw)


def _span(share: Tensor, place: Tensor, size: int) -> Tensor:
    """Of a side of ``size`` pixels those within a span, bool [B, size].

    Args:
        share: of the side, [B].
        place: [B], from 0 for the first place at which the span fits to below 1 for the last.
    """
    length = (share * size).round().clamp(1, size)[:, None]
    first = (place[:, None] * (size - length + 1)).floor()
    pixels = torch.arange(size, device=share.device)
    return (pixels >= first) & (pixels < first + length)


def _middles(size: int, like: Tensor) -> Tensor:
    """Middles of the pixels of a side, the side being from -1 to 1."""
    return (2 * torch.arange(size, device=like.device).to(like) + 1) / size - 1
