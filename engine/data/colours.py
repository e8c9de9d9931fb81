"""Colours: augmentations that change the values of pixels, and move none.

They are called as those of ``augmentations.py`` are. Images have one channel, or three for red,
green and blue. For ``colour_jitter`` and ``solarize`` their values must be from 0 to 1; this is not
looked at, since nothing is read from the device.
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
    check_range,
    check_share,
    widened,
)
from phaseloop.engine.errors import DataError
from phaseloop.engine.registry import register_augmentation

# Shares of red, green and blue in how bright a colour is: ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)
# The same beside the two axes of colour, of which hue is the angle: the YIQ of FCC NTSC, 1953.
_YIQ = ((0.299, 0.587, 0.114), (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135))


@register_augmentation("colour_jitter")
class ColourJitter:
    """Changes brightness, contrast, saturation and hue, in this order, of images from 0 to 1.

    The result is cut to 0..1, and so without a word is an image that was not in it, such as a
    standardised one: jitter first and standardise afterwards, in the model for instance.

    Brightness multiplies the image; contrast its distance from its mean brightness; saturation its
    distance from its own grey; all by a factor from 1 - strength to 1 + strength, as torchvision's
    ``ColorJitter``. Hue turns the colours' angle in YIQ.

    Args:
        brightness, contrast, saturation: strengths, 0 to 1.
        hue: largest part of a whole turn, to either side, 0 to 0.5.
        probability: of changing an image at all.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        probability: float = 1.0,
    ) -> None:
        self.brightness = check_share("brightness", brightness)
        self.contrast = check_share("contrast", contrast)
        self.saturation = check_share("saturation", saturation)
        if not 0 <= hue <= 0.5:
            raise ValueError(f"hue is {hue}, but must be from 0 to 0.5")
        self.hue = hue
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        if (self.saturation or self.hue) and images.shape[1] != 3:
            raise DataError(
                f"data.train.augment: colour_jitter's saturation and hue are for three channels, "
                f"and the images have {images.shape[1]}"
            )
        signs = 2 * draws.uniform(4, 1, 1, 1).to(given) - 1  # [B, 4, 1, 1, 1]
        bright, contrast, saturation, hue = signs.unbind(1)
        changed = given * (1 + self.brightness * bright)
        if self.contrast:
            middle = _mean(grey(changed))
            changed = torch.lerp(middle, changed, 1 + self.contrast * contrast)
        if self.saturation:
            changed = torch.lerp(grey(changed), changed, 1 + self.saturation * saturation)
        if self.hue:
            changed = _turned(changed, 2 * math.pi * self.hue * hue)
        return at_times(self.probability, changed.clamp(0, 1), images, draws)


@register_augmentation("greyscale")
class Greyscale:
    """Takes the colours out of some images, which keep their three channels.

    Args:
        probability: of doing so.

    Raises:
        ValueError: probability is not a share.
    """

    def __init__(self, probability: float = 0.2) -> None:
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        changed = grey(widened(images)).expand_as(images)
        return at_times(self.probability, changed, images, draws)


@register_augmentation("solarize")
class Solarize:
    """Turns values from a threshold on into their negative, 1 - value; of images from 0 to 1.

    Args:
        threshold: 0 to 1.
        probability: of doing so in an image.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, threshold: float = 0.5, probability: float = 0.2) -> None:
        self.threshold = check_share("threshold", threshold)
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        changed = torch.where(given >= self.threshold, 1 - given, given)
        return at_times(self.probability, changed, images, draws)


@register_augmentation("noise")
class Noise:
    """Adds normal noise to every value.

    Args:
        std: its largest standard deviation; each image's is drawn from 0 to that.

    Raises:
        ValueError: std is less than 0.
    """

    def __init__(self, std: float = 0.1) -> None:
        if not std >= 0:
            raise ValueError(f"std is {std}, but must be at least 0")
        self.std = std

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        strength = self.std * draws.uniform(1, 1, 1).to(given)
        noisy = given + strength * draws.normal(*images.shape[1:]).to(given)
        return noisy.to(images.dtype)


@register_augmentation("blur")
class Blur:
    """Smooths images with a Gaussian of a width drawn for each.

    Args:
        sigma: least and largest standard deviation of the Gaussian, in pixels. It reaches twice
            the largest to each side; beyond the border the image goes on as it is there.
        probability: of smoothing an image at all.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, sigma: Sequence[float] = (0.1, 2.0), probability: float = 0.5) -> None:
        self.sigma = check_range("sigma", sigma, above=0.0)
        self.probability = check_share("probability", probability)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        given = widened(images)
        low, high = self.sigma
        reach = math.ceil(2 * high)
        sigma = low + (high - low) * draws.uniform(1).to(given)
        steps = torch.arange(-reach, reach + 1, device=given.device).to(given)
        weights = torch.softmax(-(steps**2) / (2 * sigma**2), dim=1)[..., None, None, None]
        smooth = F.pad(given, (reach,) * 4, mode="replicate")
        for dim, size in ((-2, images.shape[-2]), (-1, images.shape[-1])):
            # By hand, since a convolution may round by the size of the batch.
            smooth = sum(  # type: ignore[assignment]
                weights[:, number] * smooth.narrow(dim, number, size)
                for number in range(2 * reach + 1)
            )
        return at_times(self.probability, smooth, images, draws)


def grey(images: Tensor) -> Tensor:
    """How bright each pixel is, [B, 1, H, W].

    Raises:
        DataError: the images have neither one channel nor three.
    """
    if images.shape[1] == 1:
        return images
    if images.shape[1] != 3:
        raise DataError(
            f"data.train.augment: images must have 1 or 3 channels, not {images.shape[1]}"
        )
    red, green, blue = torch.tensor_split(images, 3, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _mean(images: Tensor) -> Tensor:
    """Of each image [B, 1, H, W], as [B, 1, 1, 1]: halves are added until one number is left."""
    # By hand, since torch's own sum is split over threads by the size of the batch.
    total = images.flatten(1)
    while (size := total.shape[1]) > 1:
        half, odd = divmod(size, 2)
        first, second, last = torch.split(total, [half, half, odd], dim=1)
        total = first + second
        if odd:
            total[:, :1] += last
    return (total / images[0].numel())[..., None, None]


def _turned(images: Tensor, angle: Tensor) -> Tensor:
    """Colours turned by an angle [B, 1, 1, 1], radians, about the axis of greys."""
    to_yiq = torch.tensor(_YIQ, dtype=torch.float64)
    back = torch.linalg.inv(to_yiq).tolist()
    red, green, blue = torch.tensor_split(images, 3, dim=1)
    y, i, q = (row[0] * red + row[1] * green + row[2] * blue for row in _YIQ)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    i, q = cosine * i - sine * q, sine * i + cosine * q
    return torch.cat([row[0] * y + row[1] * i + row[2] * q for row in back], dim=1)
