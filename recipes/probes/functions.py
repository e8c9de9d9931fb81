"""Probes: what frozen features tell about labels, by a linear map, with few labels, by neighbours.

All compute in float64 with no draw but those of the few labels, which come from generators of their
own: the same features give the same accuracy, and nothing else is disturbed.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 1024  # queries whose similarities to the whole bank are held in memory at once
_MOST_ITERATIONS = 500  # of a regression; a hundred are enough with a penalty of 1


@dataclass(frozen=True)
class Labelled:
    """Features with their labels.

    Args:
        features: floating-point [N, D]; further dimensions are flattened.
        labels: int64 [N], each at least 0.

    Raises:
        ValueError: shapes do not fit, there is no sample, or a label is below 0.
    """

    features: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.labels.dim() != 1 or self.labels.is_floating_point():
            raise ValueError(f"labels are {_kind(self.labels)}, but must be whole numbers [N]")
        if self.features.dim() < 2 or len(self.features) != len(self.labels):
            raise ValueError(
                f"features are {_kind(self.features)}, but must be [{len(self.labels)}, D]: "
                f"a row for each label"
            )
        if len(self.labels) == 0 or int(self.labels.min()) < 0:
            raise ValueError("there must be at least one sample, and no label below 0")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> Tensor:
        """The features as float64 [N, D]."""
        return self.features.detach().flatten(1).double()


@dataclass(frozen=True)
class Linear:
    """Accuracy of a multinomial logistic regression on standardised features.

    It minimises ``sum of cross-entropies + penalty / 2 * sum of squared weights`` (Bishop, "Pattern
    Recognition and Machine Learning", 2006, 4.3.4; the bias is free), from zero, by L-BFGS. The
    minimum is the only one. scikit-learn's ``C`` is ``1 / penalty``. Features are standardised by
    mean and deviation of the bank.

    Args:
        penalty: strength of the regularisation, above 0.

    Raises:
        ValueError: penalty is not above 0.
    """

    penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_above_0("penalty", self.penalty)

    def __call__(self, bank: Labelled, queries: Labelled) -> float:
        """Share of the queries whose label a regression on the whole bank gets right, 0 to 1."""
        known, asked = standardised(bank.rows, queries.rows)
        return _accuracy(_regression(known, bank.labels, asked, self.penalty), queries.labels)


@dataclass(frozen=True)
class FewLabel:
    """Accuracy of the linear probe that sees the labels of a few samples only, over some draws.

    The other samples of the bank count without their labels: features are standardised by mean and
    deviation of all of it.

    Args:
        per_class: labels of each class.
        draws: how many choices of these the accuracy is the mean of.
        penalty: as for :class:`Linear`.
        seed: of the first draw; the others have the numbers after it.

    Raises:
        ValueError: a number is out of range.
    """

    per_class: int = 10
    draws: int = 3
    penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_whole("per_class", self.per_class, 1)
        _check_whole("draws", self.draws, 1)
        _check_above_0("penalty", self.penalty)
        _check_whole("seed", self.seed, 0)

    def __call__(self, bank: Labelled, queries: Labelled) -> float:
        """Mean share over the draws of the queries whose label is found, 0 to 1.

        Raises:
            ValueError: a class has fewer samples in the bank than ``per_class``.
        """
        known, asked = standardised(bank.rows, queries.rows)
        found = 0.0
        for draw in range(self.draws):
            chosen = self.choice(bank.labels, draw)
            predicted = _regression(known[chosen], bank.labels[chosen], asked, self.penalty)
            found += _accuracy(predicted, queries.labels)
        return found / self.draws

    def choice(self, labels: Tensor, draw: int) -> Tensor:
        """Positions [classes * per_class] of the samples that draw number ``draw`` may look at.

        A function of the labels, their order, seed and draw; the features have no part in it.
        """
        on_host = labels.cpu()
        generator = torch.Generator().manual_seed(self.seed + draw)
        chosen = []
        for label in on_host.unique().tolist():
            of_class = (on_host == label).nonzero().flatten()
            if len(of_class) < self.per_class:
                raise ValueError(
                    f"per_class is {self.per_class}, and the bank has {len(of_class)} samples of "
                    f"class {label}"
                )
            order = torch.randperm(len(of_class), generator=generator)
            chosen.append(of_class[order[: self.per_class]])
        return torch.cat(chosen).to(labels.device)


@dataclass(frozen=True)
class Neighbours:
    """Accuracy of a weighted vote of the nearest neighbours by cosine similarity.

    Each of the ``k`` most similar samples of the bank votes for its class with
    ``exp(similarity / temperature)`` (Wu, Xiong, Yu, Lin, "Unsupervised Feature Learning via
    Non-Parametric Instance Discrimination", CVPR 2018, 3.4).

    Args:
        k: neighbours that vote.
        temperature: the smaller, the more the very nearest count.

    Raises:
        ValueError: a number is out of range.
    """

    k: int = 20
    temperature: float = 0.07

    def __post_init__(self) -> None:
        _check_whole("k", self.k, 1)
        _check_above_0("temperature", self.temperature)

    def __call__(self, bank: Labelled, queries: Labelled) -> float:
        """Share of the queries whose label the vote gets right, 0 to 1.

        Raises:
            ValueError: the bank has fewer than ``k`` samples.
        """
        if self.k > len(bank):
            raise ValueError(f"k is {self.k}, and the bank has {len(bank)} samples")
        known = F.normalize(bank.rows, dim=1)
        asked = F.normalize(queries.rows, dim=1)
        predicted = [self._vote(part @ known.T, bank.labels) for part in asked.split(_CHUNK)]
        return _accuracy(torch.cat(predicted), queries.labels)

    def _vote(self, similarity: Tensor, labels: Tensor) -> Tensor:
        """Classes [B] that win, from similarities [B, N] to the bank."""
        nearest, places = similarity.topk(self.k, dim=1)
        # Less 1, the largest that there is: a small temperature would overflow.
        weights = ((nearest - 1) / self.temperature).exp()
        classes = int(labels.max()) + 1
        votes = F.one_hot(labels[places], classes).to(weights.dtype)  # [B, k, classes]
        return torch.einsum("bk,bkc->bc", weights, votes).argmax(dim=1)


def standardised(bank: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Both [N, D] with the bank's means taken off and divided by its deviations.

    A feature that is the same all over the bank has no deviation, and becomes 0 there.
    """
    mean = bank.mean(dim=0)
    deviation = bank.std(dim=0, correction=0)
    # What only rounding tells apart is the same, too: divided by, it would be noise.
    same = deviation <= 1e-7 * mean.abs()
    deviation = torch.where(same, torch.ones_like(deviation), deviation)
    return (bank - mean) / deviation, (queries - mean) / deviation


def _regression(known: Tensor, labels: Tensor, asked: Tensor, penalty: float) -> Tensor:
    """Classes [M] of ``asked`` [M, D] by a logistic regression on ``known`` [N, D]."""
    # Of those classes alone that are there: the bias of another would fall without end.
    classes, places = labels.unique(return_inverse=True)
    weight = known.new_zeros(len(classes), known.shape[1], requires_grad=True)
    bias = known.new_zeros(len(classes), requires_grad=True)
    # The mean over samples, so that the tolerances mean the same for any number of them.
    strength = penalty / (2 * len(known))
    # The weaker the penalty, the flatter it is around the minimum.
    tolerance = min(1.0, penalty)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_MOST_ITERATIONS,
        max_eval=25 * _MOST_ITERATIONS,  # the most that a line search takes
        tolerance_grad=1e-5 * tolerance,
        tolerance_change=1e-10 * tolerance,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(known, weight, bias), places)
        value = value + strength * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():  # a test phase has turned it off
        optimizer.step(loss)
    if optimizer.state[weight]["n_iter"] >= _MOST_ITERATIONS:
        warnings.warn(
            f"a regression with penalty {penalty:g} is not at its minimum after "
            f"{_MOST_ITERATIONS} iterations; a larger penalty gets there sooner",
            stacklevel=2,
        )
    with torch.no_grad():
        return classes[F.linear(asked, weight, bias).argmax(dim=1)]


def _accuracy(predicted: Tensor, labels: Tensor) -> float:
    return float((predicted == labels).double().mean())


def _check_above_0(name: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}, but must be a number above 0")


def _check_whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {least}")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
