"""Learning from a teacher that follows the network slowly: its model, and the losses BYOL and MoCo.

The hook ``teacher`` moves the teacher; the step is ``contrastive``, whose pairs are here mappings:
``prediction`` [n, P] of the network, and ``target`` [n, P] of its teacher, for each view.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phaseloop import Gathered, register_criterion, register_model

from .model import SSLNetwork, head

Pair = Mapping[str, Tensor]


@register_model("ssl_teacher")
class TeacherNetwork(SSLNetwork):
    """The network of the recipe with a teacher beside it, and a head that predicts the teacher.

    Called as ``model(images)`` it gives ``{"prediction": [B, P], "target": [B, P]}``; with
    ``output`` it gives what :class:`SSLNetwork` does, of the network and not of its teacher.

    The teacher is ``teacher.backbone`` and ``teacher.projection``, and needs no gradient. Its batch
    norms go by the batch at hand, as the network's do.

    Args:
        widths, channels, pool, projection, classes: as of :class:`SSLNetwork`.
        prediction: widths of the predicting head; none: the projection is the prediction.

    Raises:
        ValueError: an option is out of range, or the prediction is not as wide as the projection.
    """

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128),
        channels: int = 1,
        pool: int = 1,
        projection: Sequence[int] = (128, 64),
        prediction: Sequence[int] | None = (128, 64),
        classes: int | None = None,
    ) -> None:
        super().__init__(widths, channels, pool, projection, classes)
        if prediction and prediction[-1] != projection[-1]:
            raise ValueError(
                f"prediction is {list(prediction)}, but must end with {projection[-1]}, the width "
                f"of the projection"
            )
        assert self.projection is not None
        parts: dict[str, nn.Module] = {"backbone": self.backbone, "projection": self.projection}
        self.teacher = nn.ModuleDict(copy.deepcopy(parts)).requires_grad_(False)
        self.prediction = head(projection[-1], prediction) if prediction else nn.Identity()

    def forward(self, images: Tensor, output: str | None = None) -> Any:
        """Map images float [B, C, H, W] to prediction and target, or to what ``output`` says."""
        if output is not None:
            return super().forward(images, output)
        with torch.no_grad():
            target = self.teacher["projection"](self.teacher["backbone"](images))
        projection = super().forward(images, "projection")
        return {"prediction": self.prediction(projection), "target": target}


@register_criterion("byol")
class BYOL(nn.Module):
    """The prediction from each view has to point where the teacher's projection of the other does.

    Grill et al., "Bootstrap your own latent: A new approach to self-supervised learning", NeurIPS
    2020, equation 2, for both views: the mean of ``2 - 2 * cosine``, from 0 to 4.
    """

    def forward(self, own: tuple[Pair, Pair], everyone: Gathered) -> Tensor:
        """The mean loss over the n samples of this process, float []; 0 where there are none."""
        first, second = own
        losses = _distance(first["prediction"], second["target"])
        losses = losses + _distance(second["prediction"], first["target"])
        return losses.sum() / max(1, 2 * len(losses))


def _distance(prediction: Tensor, target: Tensor) -> Tensor:
    """2 - 2 * cosine similarity of the rows, [n]."""
    return 2 - 2 * F.cosine_similarity(prediction, target, dim=1)


@register_criterion("moco")
class MoCo(nn.Module):
    """The teacher's projection of the other view has to be nearer than those of a queue.

    He, Fan, Wu, Xie, Girshick, "Momentum Contrast for Unsupervised Visual Representation Learning",
    CVPR 2020, equation 1: with q and k the prediction from one view and the teacher's projection of
    the other, both of length 1, and k(i) what is in the queue,

        l = -log( exp(q k / t) / (exp(q k / t) + sum over i of exp(q k(i) / t)) )

    The mean over samples, and over both views. Afterwards the teacher's projections of the batch,
    of all processes, go into the queue, and as many of the oldest out of it. It begins with zeros,
    which are like nothing; so does a projection that is not finite, so that one bad batch spoils
    its own loss alone. The queue is in every checkpoint.

    Args:
        size: of the queue, projections.
        dim: P, the width of the projection.
        temperature: t.

    Raises:
        ValueError: a number is out of range.
    """

    queue: Tensor

    def __init__(self, size: int, dim: int, temperature: float = 0.2) -> None:
        super().__init__()
        for name, value in {"size": size, "dim": dim, "temperature": temperature}.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}, but must be above 0")
        self.temperature = temperature
        self.register_buffer("queue", torch.zeros(size, dim))

    def forward(self, own: tuple[Pair, Pair], everyone: Gathered) -> Tensor:
        """The mean loss over the n samples of this process, float []; 0 where there are none."""
        first, second = own
        losses = self._losses(first["prediction"], second["target"])
        losses = losses + self._losses(second["prediction"], first["target"])
        keys = torch.cat([everyone.first["target"], everyone.second["target"]])
        # What is not finite would spoil every loss while it is in the queue; zeros are nothing.
        keys = torch.where(keys.isfinite().all(dim=1, keepdim=True), keys.detach(), 0.0)
        newest = torch.cat([F.normalize(keys, dim=1).to(self.queue), self.queue])
        # Into the same memory: a checkpoint is made of this tensor.
        self.queue.copy_(newest[: len(self.queue)])
        return losses.sum() / max(1, 2 * len(losses))

    def _losses(self, prediction: Tensor, target: Tensor) -> Tensor:
        """[n], of one view."""
        query, key = F.normalize(prediction, dim=1), F.normalize(target, dim=1)
        right = (query * key).sum(dim=1, keepdim=True)
        # A copy, since the queue moves on before backward goes through it.
        logits = torch.cat([right, query @ self.queue.clone().T], dim=1) / self.temperature
        return F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long),
                               reduction="none")  # fmt: skip
