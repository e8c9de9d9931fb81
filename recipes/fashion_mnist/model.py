"""A perceptron with one hidden layer, and small convolutional networks with batch norm."""

from collections.abc import Sequence

import torch
from torch import nn

from phaseloop import register_model

from .data import CLASSES, SIZE

MEAN, DEVIATION = 0.286, 0.353  # of the pixels of the 60,000 images for training


@register_model("fashion_mlp")
class FashionMLP(nn.Module):
    """Classify images [B, 1, 28, 28] into logits [B, 10]; 101,770 parameters by default.

    Args:
        hidden: units of the one hidden layer.
    """

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden is {hidden}, but must be at least 1")
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, hidden), nn.ReLU())
        self.classify = nn.Linear(hidden, len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images float32 [B, 1, 28, 28], 0 to 1, to logits float32 [B, 10]."""
        return self.classify(self.features((images - MEAN) / DEVIATION))


def _block(channels_in: int, channels_out: int, halves: bool) -> list[nn.Module]:
    return [
        # No bias: the batch norm after it subtracts the mean, and a bias with it.
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        # Halved before the norm and not after it, these have a quarter of the work.
        *([nn.MaxPool2d(2)] if halves else []),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    ]


@register_model("fashion_cnn")
class FashionCNN(nn.Module):
    """Classify images [B, 1, 28, 28] into logits [B, 10].

    3x3 convolutions in stages, between which the image is halved. What the last stage leaves is
    averaged over the image, or over each part of it.

    Args:
        stages: channels of each convolution, stage by stage. `[[16], [32], [64]]` has 24,058
            parameters.
        pool: parts of the image on each side that averages are taken over: 1 is all of it.
    """

    def __init__(self, stages: Sequence[Sequence[int]], pool: int = 1) -> None:
        super().__init__()
        if not stages or not all(stages) or any(n < 1 for stage in stages for n in stage):
            raise ValueError(f"stages is {stages!r}, but must be lists of channels, each above 0")
        if pool < 1:
            raise ValueError(f"pool is {pool}, but must be at least 1")
        layers: list[nn.Module] = []
        channels = 1
        for number, stage in enumerate(stages, 1):
            for place, width in enumerate(stage, 1):
                halves = place == len(stage) and number < len(stages)
                layers += _block(channels, width, halves)
                channels = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(pool), nn.Flatten())
        self.classify = nn.Linear(channels * pool * pool, len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images float32 [B, 1, 28, 28], 0 to 1, to logits float32 [B, 10]."""
        return self.classify(self.features((images - MEAN) / DEVIATION))
