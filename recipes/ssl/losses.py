"""Losses over two views of a batch, as the step ``contrastive`` calls them.

Each is called with ``(first, second)``, the projections [n, P] of this process's samples, and with
``everyone``, which has ``first`` and ``second`` [N, P] of the samples of all processes and
``start``, the number of this process's first row among them. On one process both are the same.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phaseloop import Gathered, register_criterion


@register_criterion("nt_xent")
class NTXent(nn.Module):
    """Each view has to be nearer to the sample's other view than to all views of other samples.

    Chen, Kornblith, Norouzi, Hinton, "A Simple Framework for Contrastive Learning of Visual
    Representations", ICML 2020, equation 1: with s the cosine similarity and t the temperature,
    the loss of view i, whose other view is j, is

        l(i, j) = -log( exp(s(i, j) / t) / sum over k != i of exp(s(i, k) / t) )

    with k over all 2N views; the loss is the mean over the 2n views of this process.

    Args:
        temperature: t.

    Raises:
        ValueError: temperature is not above 0.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, but must be above 0")
        self.temperature = temperature

    def forward(self, own: tuple[Tensor, Tensor], everyone: Gathered) -> Tensor:
        """The mean loss, float []; 0 where this process has no sample."""
        rows, total, start = len(own[0]), len(everyone.first), everyone.start
        views = F.normalize(torch.cat([*own]), dim=1)  # [2n, P]
        others = F.normalize(torch.cat([everyone.first, everyone.second]), dim=1)  # [2N, P]
        logits = views @ others.T / self.temperature  # [2n, 2N]
        place = torch.arange(start, start + rows, device=logits.device)
        itself = torch.cat([place, place + total])
        logits = logits.scatter(1, itself[:, None], -torch.inf)
        other_view = torch.cat([place + total, place])
        losses = F.cross_entropy(logits, other_view, reduction="sum")
        return losses / max(1, 2 * rows)


@register_criterion("vicreg")
class VICReg(nn.Module):
    """Views alike, every dimension spread out, no two dimensions saying the same.

    Bardes, Ponce, LeCun, "VICReg: Variance-Invariance-Covariance Regularization for
    Self-Supervised Learning", ICLR 2022, equations 1 to 6, with the mean over dimensions in the
    invariance, and half the sum of both views in the variance, as in the authors' program. It is a
    function of all processes' rows.

    Args:
        invariance, variance, covariance: weights of the three parts.
        eps: added to a variance under its root.

    Raises:
        ValueError: a weight is less than 0.
    """

    def __init__(
        self,
        invariance: float = 25.0,
        variance: float = 25.0,
        covariance: float = 1.0,
        eps: float = 1e-4,
    ) -> None:
        super().__init__()
        self.weights = {
            "invariance": invariance, "variance": variance, "covariance": covariance
        }  # fmt: skip
        for name, weight in self.weights.items():
            if not weight >= 0:
                raise ValueError(f"{name} is {weight}, but must be at least 0")
        self.eps = eps

    def forward(self, own: tuple[Tensor, Tensor], everyone: Gathered) -> dict[str, Tensor]:
        """The three parts, each times its weight; float []."""
        first, second = everyone.first, everyone.second
        parts = {
            "invariance": F.mse_loss(first, second),
            "variance": (self._variance(first) + self._variance(second)) / 2,
            "covariance": self._covariance(first) + self._covariance(second),
        }
        return {name: self.weights[name] * part for name, part in parts.items()}

    def _variance(self, views: Tensor) -> Tensor:
        """How far the standard deviation of the dimensions is below 1."""
        centred = views - views.mean(dim=0)
        variance = centred.square().sum(dim=0) / max(1, len(views) - 1)
        return F.relu(1 - (variance + self.eps).sqrt()).mean()

    def _covariance(self, views: Tensor) -> Tensor:
        """Squares of the covariances of different dimensions, per dimension."""
        centred = views - views.mean(dim=0)
        covariance = centred.T @ centred / max(1, len(views) - 1)
        off_diagonal = covariance.square().sum() - covariance.diagonal().square().sum()
        return off_diagonal / views.shape[1]
