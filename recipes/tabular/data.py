"""The diabetes data as a dataset in memory, in the units it was measured in, and its statistics."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phaseloop import TensorData, register_dataset

PATH = pathlib.Path(__file__).with_name("diabetes.npz")
SPLITS = ("train", "test")


@register_dataset("diabetes")
class Diabetes(TensorData):
    """One split: measurements float32 [N, 10] and progression of the disease float32 [N].

    Nothing is standardised here: the model does that, so that it goes with the model.

    Args:
        split: "train" (354 samples) or "test" (88 samples).
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
        with np.load(PATH, allow_pickle=False) as file:
            rows = file["test"] if split == "test" else ~file["test"]
            features, targets = (torch.from_numpy(file[n][rows]) for n in ("features", "targets"))
        super().__init__(features, targets)


@dataclass(frozen=True)
class Statistics:
    """Means and standard deviations over the training split; nothing of the test split is in them.

    Attributes:
        mean, spread: of each measurement, float32 [10].
        target_mean, target_spread: of the target, float32 [].
    """

    mean: Tensor
    spread: Tensor
    target_mean: Tensor
    target_spread: Tensor


def statistics() -> Statistics:
    """The statistics of the training split."""
    features, targets = (tensor.double() for tensor in Diabetes("train").tensors)
    found = (f(x) for x in (features, targets) for f in (_mean, _spread))
    return Statistics(*(value.float() for value in found))


def _mean(values: Tensor) -> Tensor:
    return values.mean(dim=0)


def _spread(values: Tensor) -> Tensor:
    return values.std(dim=0, correction=0)
