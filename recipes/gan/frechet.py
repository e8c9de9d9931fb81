"""The meter `frechet`: how far generated images are from real ones, in the eyes of a judge."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from phaseloop import register_meter
from phaseloop.recipes.digits import DigitsCNN

WEIGHTS = Path(__file__).with_name("judge.safetensors")
SCALE = 2.0
"""What the judge's features are multiplied by, so distances by its square. With it an untrained
generator is at about 290; README.md says why."""

_FEATURES, _DIGITS = 48, 10


class Judge(nn.Module):
    """The trained network of the recipe digits; it is never trained here."""

    def __init__(self) -> None:
        super().__init__()
        self.network = DigitsCNN()
        self.network.load_state_dict(load_file(WEIGHTS))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images [B, 1, 8, 8] to features float64 [B, 48] and digits int64 [B]."""
        features = self.network.features(images)
        return features.double() * SCALE, self.network.classify(features).argmax(dim=1)


class _Moments:
    """Number, sum and sum of outer products of features."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)
        self.sum = torch.zeros(_FEATURES, dtype=torch.float64)
        self.outer = torch.zeros(_FEATURES, _FEATURES, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        self.count += len(features)
        self.sum += features.sum(dim=0)
        self.outer += features.T @ features

    def normal(self) -> tuple[Tensor, Tensor]:
        """Mean [D] and covariance [D, D]."""
        mean = self.sum / self.count
        return mean, (self.outer - self.count * mean.outer(mean)) / (self.count - 1)


@register_meter("frechet")
class Frechet:
    """`distance`: Fréchet distance between the normal laws of the judge's features of both.

    ``|m - n|² + tr(C + S - 2 √(C S))``, with means m, n and covariances C, S. Heusel et al., "GANs
    trained by a two time-scale update rule" (2017), with this judge in place of Inception.

    `rarest_digit`: of the ten digits the smallest share among the generated images, as the judge
    reads them. Of fewer than two images of either there is no distance: NaN.
    """

    higher_is_better = {"distance": False, "rarest_digit": True}  # noqa: RUF012

    def __init__(self) -> None:
        self.judge = Judge()
        self.made, self.real = _Moments(), _Moments()
        self.digits = torch.zeros(_DIGITS, dtype=torch.int64)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in generated images [M, 1, 8, 8] and real ones [B, 1, 8, 8]."""
        features, digits = self.judge(output.detach())
        self.made.add(features)
        self.digits += nn.functional.one_hot(digits, _DIGITS).sum(dim=0)
        self.real.add(self.judge(target)[0])

    def compute(self) -> dict[str, Tensor]:
        if min(int(self.made.count), int(self.real.count)) < 2:
            distance = self.made.sum.new_tensor(torch.nan)
        else:
            distance = frechet_distance(*self.made.normal(), *self.real.normal())
        return {"distance": distance, "rarest_digit": self.digits.min() / self.digits.sum()}

    def reset(self) -> None:
        for tensor in self.summed():
            tensor.zero_()

    def to(self, device: torch.device) -> "Frechet":
        self.judge.to(device)
        for owner in (self.made, self.real, self):
            for name, value in vars(owner).items():
                if isinstance(value, Tensor):
                    setattr(owner, name, value.to(device))
        return self

    def state_dict(self) -> dict[str, Any]:
        return {str(number): tensor for number, tensor in enumerate(self.summed())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, tensor in enumerate(self.summed()):
            tensor.copy_(state[str(number)])

    def summed(self) -> list[Tensor]:
        parts = [[m.count, m.sum, m.outer] for m in (self.made, self.real)]
        return [*parts[0], *parts[1], self.digits]


def frechet_distance(m: Tensor, c: Tensor, n: Tensor, s: Tensor) -> Tensor:
    """Between two normal laws: means [D], covariances [D, D], float64.

    The trace of √(C S) is the sum of the square roots of the eigenvalues of √C S √C, which is
    symmetric.
    """
    values, vectors = torch.linalg.eigh(c)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    common = torch.linalg.eigvalsh(root @ s @ root).clamp(min=0).sqrt().sum()
    return (m - n).square().sum() + c.trace() + s.trace() - 2 * common
