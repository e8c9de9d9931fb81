"""A small convolutional network with batch norm that narrows an 8x8 image to a single point."""

import torch
from torch import nn

from phaseloop import register_model

CLASSES = 10


def _block(channels_in: int, channels_out: int, padding: int) -> list[nn.Module]:
    return [
        # No bias: the batch norm after it subtracts the mean, and a bias with it.
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=padding, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    ]


@register_model("digits_cnn")
class DigitsCNN(nn.Module):
    """Classify images [B, 1, 8, 8] into logits [B, 10]; 16,450 parameters by default.

    Args:
        width: channels of the first two convolutions; the third has twice as many.
        dropout: share of the features before the last layer that training zeroes, 0 to 1.
    """

    def __init__(self, width: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}, but must be at least 1")
        # Only the first convolution pads. The digits reach the top and bottom rows, so it has to;
        # the later ones cost half as much without, and end at 1x1, where no pooling is needed.
        self.features = nn.Sequential(
            *_block(1, width, padding=1),  # [B, width, 8, 8]
            *_block(width, width, padding=0),  # [B, width, 6, 6]
            nn.MaxPool2d(2),  # [B, width, 3, 3]
            *_block(width, 2 * width, padding=0),  # [B, 2 * width, 1, 1]
            nn.Flatten(),  # [B, 2 * width]
        )
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(2 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images float32 [B, 1, 8, 8] to logits float32 [B, 10]."""
        return self.classify(self.dropout(self.features(images)))
