"""Augmenting: what augmentations have in common: checks, precision, probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phaseloop.engine.data.augment import Draws
from phaseloop.engine.errors import DataError


def at_times(probability: float, changed: Tensor, images: Tensor, draws: Draws) -> Tensor:
    """``changed`` for that share of the samples, ``images`` for the others, of whose type it is."""
    changed = changed.to(images.dtype)
    if probability >= 1:
        return changed
    chosen = draws.uniform() < probability
    return torch.where(chosen[:, None, None, None], changed, images)


def check_images(images: Tensor) -> None:
    """Raises DataError for what is no batch of images."""
    if images.dim() != 4:
        raise DataError(
            f"data.train.augment: images must be [B, C, H, W], and they are {list(images.shape)}"
        )


def widened(images: Tensor) -> Tensor:
    """The images in float32 at least, to work on.

    Raises:
        DataError: see :func:`check_images`.
    """
    check_images(images)
    return images.to(torch.promote_types(images.dtype, torch.float32))


def check_share(name: str, value: float) -> float:
    """Raises ValueError unless it is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, but must be from 0 to 1")
    return value


def check_range(
    name: str, value: Sequence[float], above: float, most: float = math.inf
) -> tuple[float, float]:
    """Raises ValueError unless it is (least, largest), above one number and at most another."""
    if len(value) != 2 or not above < value[0] <= value[1] <= most:
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise ValueError(
            f"{name} is {list(value)}, but must be [least, largest], above {above:g}{limit}"
        )
    return value[0], value[1]
