"""What is measured of a model of characters: its loss, and bits per character."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from phaseloop import register_criterion, register_meter

from .data import IGNORED


@register_criterion("char_cross_entropy")
class CharCrossEntropy(torch.nn.Module):
    """Mean cross-entropy in nats of logits [B, T, C] and characters [B, T] that are not -100.

    0 where none counts.
    """

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        flat = target.flatten()
        total = F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=IGNORED, reduction="sum")
        return total / (flat != IGNORED).sum().clamp(min=1)


@register_meter("bits_per_character")
class BitsPerCharacter(Metric):
    """Mean of -log2 of the share that the model gave to the character that came.

    ``update`` takes logits [B, T, C] and characters int64 [B, T]; those that are -100 are left out.
    """

    higher_is_better = False
    full_state_update = False
    nats: Tensor
    characters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("characters", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        flat = target.flatten()
        each = F.cross_entropy(
            logits.detach().flatten(0, 1), flat, ignore_index=IGNORED, reduction="none"
        )
        self.nats += each.sum(dtype=torch.float64)
        self.characters += (flat != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.nats / self.characters / math.log(2)
