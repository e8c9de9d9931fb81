"""Batch transforms: what is done to a whole collated micro-batch, such as mixup and cutmix.

A batch transform is called with what the collate function or ``fetch`` gave, where that is read,
and gives a batch of the same form. Python's, NumPy's and torch's generators are seeded before it
from the micro-batch's first position. It sees one micro-batch: cutting a batch into several gives
it other partners to mix, and so another update.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.registry import register_batch_transform

_KEY = "data.train.batch_transform"


class _Mixing:
    """Base: mixes every sample with another of the micro-batch, inputs and targets alike.

    A subclass says in ``_mix`` how two inputs are mixed.
    """

    def __init__(self, classes: int | None, alpha: float, probability: float) -> None:
        if classes is not None and classes < 2:
            raise ConfigError(f"{_KEY}.classes", f"{classes} is less than 2")
        _check_alpha(alpha, "alpha")
        _check_share(probability, "probability")
        self.classes = classes
        self.alpha = alpha
        self.probability = probability

    def __call__(self, batch: Any) -> Any:
        """A pair (input, target), or a mapping that has both; what else it has stays as it is.

        Raises:
            DataError: the batch is neither, or has targets that cannot be mixed.
        """
        return _apply(self._pair, batch)

    def _pair(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        soft = _soft(targets, self.classes)
        if random.random() >= self.probability:
            return inputs, soft
        # Only now, so that both draws are made in the same order whatever was drawn before.
        share = random.betavariate(self.alpha, self.alpha)
        partners = torch.randperm(len(inputs))
        inputs, share = self._mix(inputs, inputs[partners], share)
        return inputs, soft * share + soft[partners] * (1 - share)

    def _mix(self, inputs: Tensor, others: Tensor, share: float) -> tuple[Tensor, float]:
        """The mixed inputs, and the share of the first in them."""
        raise NotImplementedError


@register_batch_transform("mixup")
class MixUp(_Mixing):
    """share * a + (1 - share) * b for inputs and targets; share from Beta(alpha, alpha).

    Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR 2018,
    equation 1. One share for the micro-batch, as in the authors' program.

    Args:
        classes: how many there are, for targets that are class numbers [B]; None: the targets are
            shares of the classes [B, C] already.
        alpha: of the Beta distribution; the larger, the more is mixed.
        probability: of mixing a micro-batch at all.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self, classes: int | None = None, alpha: float = 0.2, probability: float = 1.0
    ) -> None:
        super().__init__(classes, alpha, probability)

    def _mix(self, inputs: Tensor, others: Tensor, share: float) -> tuple[Tensor, float]:
        if not inputs.is_floating_point():
            raise DataError(f"{_KEY}: mixup needs inputs of floating-point numbers")
        return torch.lerp(others, inputs, share), share


@register_batch_transform("cutmix")
class CutMix(_Mixing):
    """A box of each image is taken from another image; targets are mixed by the box's area.

    Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
    Features", ICCV 2019, equations 1 and 2 and algorithm A1: with share from Beta(alpha, alpha)
    the box has sqrt(1 - share) of each side, its middle is anywhere, what is outside is cut off,
    and the share is then that of the pixels that were left. One box for the micro-batch.

    Args:
        classes, alpha, probability: see :class:`MixUp`.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self, classes: int | None = None, alpha: float = 1.0, probability: float = 1.0
    ) -> None:
        super().__init__(classes, alpha, probability)

    def _mix(self, inputs: Tensor, others: Tensor, share: float) -> tuple[Tensor, float]:
        if inputs.dim() < 3:
            raise DataError(
                f"{_KEY}: cutmix needs images [B, ..., height, width], not {list(inputs.shape)}"
            )
        height, width = inputs.shape[-2:]
        top, bottom = _span(height, share)
        left, right = _span(width, share)
        inputs = inputs.clone()
        inputs[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        return inputs, 1 - (bottom - top) * (right - left) / (height * width)


@register_batch_transform("mixup_cutmix")
class MixUpOrCutMix:
    """Mixup or cutmix, chosen anew for every micro-batch.

    Args:
        classes: see :class:`MixUp`.
        mixup_alpha, cutmix_alpha: of the two.
        switch: probability of cutmix where something is mixed.
        probability: of mixing a micro-batch at all.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        classes: int | None = None,
        mixup_alpha: float = 0.2,
        cutmix_alpha: float = 1.0,
        switch: float = 0.5,
        probability: float = 1.0,
    ) -> None:
        _check_alpha(mixup_alpha, "mixup_alpha")
        _check_alpha(cutmix_alpha, "cutmix_alpha")
        _check_share(switch, "switch")
        self.switch = switch
        self.mixup = MixUp(classes, mixup_alpha, probability)
        self.cutmix = CutMix(classes, cutmix_alpha, probability)

    def __call__(self, batch: Any) -> Any:
        """See :class:`MixUp`."""
        return (self.cutmix if random.random() < self.switch else self.mixup)(batch)


def _apply(pair: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], batch: Any) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and _tensors(*batch):
        return pair(*batch)
    if isinstance(batch, Mapping) and _tensors(batch.get("input"), batch.get("target")):
        inputs, targets = pair(batch["input"], batch["target"])
        return {**batch, "input": inputs, "target": targets}
    raise DataError(
        f"{_KEY}: a batch must be a pair of tensors (input, target), or a mapping with tensors "
        f"'input' and 'target', not {type(batch).__name__}"
    )


def _tensors(*values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _soft(targets: Tensor, classes: int | None) -> Tensor:
    """Targets as shares of the classes, float [B, C]."""
    if targets.dim() == 2 and targets.is_floating_point():
        return targets
    if targets.dim() != 1 or targets.is_floating_point():
        raise DataError(
            f"{_KEY}: targets must be class numbers of shape [B] or shares of shape [B, C], "
            f"not {targets.dtype} {list(targets.shape)}"
        )
    if classes is None:
        raise ConfigError(f"{_KEY}.classes", "the targets are class numbers: say how many")
    if len(targets) and int(targets.max()) >= classes:
        raise ConfigError(
            f"{_KEY}.classes", f"{classes}, and there is a target of class {int(targets.max())}"
        )
    return torch.nn.functional.one_hot(targets.long(), classes).to(torch.get_default_dtype())


def _span(size: int, share: float) -> tuple[int, int]:
    """Where the box begins and ends along one side."""
    length = int(size * math.sqrt(1 - share))
    middle = random.randrange(size)
    return max(0, middle - length // 2), min(size, middle + length - length // 2)


def _check_alpha(alpha: float, name: str) -> None:
    if not 0 < alpha < math.inf:
        raise ConfigError(f"{_KEY}.{name}", f"{alpha} is not greater than 0")


def _check_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{_KEY}.{name}", f"{value} is not between 0 and 1")
