"""A small convolutional network whose features are learnt without labels, and its heads."""

from collections.abc import Sequence

from torch import Tensor, nn

from phaseloop import register_model


@register_model("ssl_cnn")
class SSLNetwork(nn.Module):
    """A backbone, a projection head that the loss looks at, and a classifier where one is asked.

    Called as ``model(images, output=...)`` it gives

    - ``"features"``: float [B, D], of the backbone; what probes and fine-tuning look at;
    - ``"projection"``: float [B, P], of the projection head;
    - ``"logits"``: float [B, classes], of a linear classifier on the features.

    Args:
        widths: channels of the backbone's stages; each halves the image's sides.
        channels: of the images.
        pool: the backbone's last map is averaged to so many places on each side, so that
            D = widths[-1] * pool * pool.
        projection: widths of the projection head, the last of them is P; none: no head.
        classes: of the classifier; none: no classifier.
        output: what a call gives that does not say.

    Raises:
        ValueError: an option is out of range, or ``output`` is of a head that is not there.
    """

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128),
        channels: int = 1,
        pool: int = 1,
        projection: Sequence[int] | None = (128, 64),
        classes: int | None = None,
        output: str = "projection",
    ) -> None:
        super().__init__()
        for name, numbers in (("widths", widths), ("projection", projection or [1])):
            if not numbers or min(numbers) < 1:
                raise ValueError(f"{name} is {list(numbers)}, but must be numbers of at least 1")
        if pool < 1:
            raise ValueError(f"pool is {pool}, but must be at least 1")
        self.backbone = backbone(channels, widths, pool)
        self.width = widths[-1] * pool * pool
        self.projection = None if not projection else head(self.width, projection)
        self.classifier = None if classes is None else nn.Linear(self.width, classes)
        self.output = output
        self._check(output)

    def forward(self, images: Tensor, output: str | None = None) -> Tensor:
        """Map images float [B, C, H, W] to what ``output`` says."""
        output = output or self.output
        part = self._check(output)
        features: Tensor = self.backbone(images)
        return features if part is self.backbone else part(features)

    def _check(self, output: str) -> nn.Module:
        """The part that makes this output; raises ValueError where there is none."""
        parts = {
            "features": self.backbone,
            "projection": self.projection,
            "logits": self.classifier,
        }
        part = parts.get(output)
        if part is None:
            there = ", ".join(name for name, one in parts.items() if one is not None)
            raise ValueError(f"output is {output!r}, but this model has {there}")
        return part


def backbone(channels: int, widths: Sequence[int], pool: int) -> nn.Sequential:
    """Images [B, channels, H, W] to features [B, widths[-1] * pool * pool]."""
    layers: list[nn.Module] = []
    for number, width in enumerate(widths):
        if number:
            layers.append(nn.MaxPool2d(2))
        layers += [
            # No bias: the batch norm after it subtracts the mean, and a bias with it.
            nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(pool), nn.Flatten())


def head(width: int, widths: Sequence[int]) -> nn.Sequential:
    """Features [B, width] to projections [B, widths[-1]]: norm and ReLU between the layers."""
    layers: list[nn.Module] = []
    for number, wide in enumerate(widths):
        last = number == len(widths) - 1
        layers.append(nn.Linear(width, wide, bias=last))
        if not last:
            layers += [nn.BatchNorm1d(wide), nn.ReLU(inplace=True)]
        width = wide
    return nn.Sequential(*layers)
