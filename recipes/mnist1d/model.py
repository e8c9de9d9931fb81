"""A convolutional network for short signals: three times half as long, then one layer."""

from __future__ import annotations

import torch
from torch import nn

from phaseloop import register_model

CLASSES = 10


def _block(channels_in: int, channels_out: int, kernel: int) -> list[nn.Module]:
    return [
        # No bias: the batch norm after it subtracts the mean, and a bias with it.
        nn.Conv1d(channels_in, channels_out, kernel, stride=2, padding=kernel // 2, bias=False),
        nn.BatchNorm1d(channels_out),
        nn.ReLU(inplace=True),
    ]


@register_model("mnist1d_cnn")
class Mnist1DCNN(nn.Module):
    """Classify signals [B, 1, 40] into logits [B, 10]; 8,106 parameters by default.

    Args:
        width: channels of each convolution.
        dropout: share of the features before the last layer that training zeroes, 0 to 1.
    """

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}, but must be at least 1")
        self.features = nn.Sequential(
            *_block(1, width, 5),  # [B, width, 20]
            *_block(width, width, 3),  # [B, width, 10]
            *_block(width, width, 3),  # [B, width, 5]
            nn.Flatten(),  # [B, 5 * width]
        )
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(5 * width, CLASSES)

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        """Map signals float32 [B, 1, 40] to logits float32 [B, 10]."""
        return self.classify(self.dropout(self.features(signals)))
