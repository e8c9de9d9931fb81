"""A small network that takes and gives numbers in their own units, and the loss for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phaseloop import register_criterion, register_model

from .data import statistics


@register_model("tabular_mlp")
class TabularMLP(nn.Module):
    """Measurements [B, 10] to the progression of the disease [B], both as measured.

    Within, both are standardised by the training split's statistics. Those are buffers: they are in
    every checkpoint and every exported file, and whoever has the weights has them.

    Args:
        hidden: units of the hidden layer.
        dropout: share of them that training zeroes, 0 to 1.
    """

    mean: Tensor
    spread: Tensor
    target_mean: Tensor
    target_spread: Tensor

    def __init__(self, hidden: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden is {hidden}, but must be at least 1")
        known = statistics()
        for name in ("mean", "spread", "target_mean", "target_spread"):
            self.register_buffer(name, getattr(known, name))
        self.layers = nn.Sequential(
            nn.Linear(len(known.mean), hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )

    def forward(self, measurements: Tensor) -> Tensor:
        """Map measurements float32 [B, 10] to the progression, float32 [B]."""
        standard = (measurements - self.mean) / self.spread
        return self.target_mean + self.target_spread * self.layers(standard).squeeze(1)


@register_criterion("standard_mse")
class StandardMSE(nn.Module):
    """Mean squared error in units of the training targets' variance.

    It is what the error of standardised targets would be: 1 for the mean of the training targets,
    whatever the units. So a learning rate does not depend on them.
    """

    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", statistics().target_spread.square())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(output, target) / self.variance
