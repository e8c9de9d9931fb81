"""A few labelled samples of each class of another dataset: what fine-tuning has to make do with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phaseloop import register_dataset


@register_dataset("few_labels")
class FewLabels(Dataset):
    """`per_class` samples of each class of `dataset`, class after class, as it gives them.

    Which ones is a function of the labels and `draw` alone: not of torch's generators, nor of the
    run's seed.

    Args:
        dataset: a map-style dataset with `targets`, whole numbers [N], the class of each sample.
        per_class: samples of each class.
        draw: the number of the choice, at least 0.

    Raises:
        ValueError: an argument is out of range, or a class has fewer samples.
    """

    def __init__(self, dataset: Any, per_class: int = 10, draw: int = 0) -> None:
        if per_class < 1:
            raise ValueError(f"per_class is {per_class}, but must be at least 1")
        if draw < 0:
            raise ValueError(f"draw is {draw}, but must be at least 0")
        if not hasattr(dataset, "targets"):
            raise ValueError(f"dataset: {type(dataset).__name__} has no attribute 'targets'")
        labels = np.asarray(dataset.targets)
        self.dataset = dataset
        self.chosen = torch.from_numpy(_chosen(labels, per_class, draw))  # [classes * per_class]
        self.targets = labels[self.chosen.numpy()]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, as the dataset gives it."""
        return self.dataset[int(self.chosen[index])]

    @property
    def fetch(self) -> Callable[[Any], Any]:
        """`fetch(indices)` gives a whole batch, where the dataset can."""
        fetch = self.dataset.fetch  # AttributeError: it cannot
        return lambda indices: fetch(self.chosen[indices])


def _chosen(labels: np.ndarray, per_class: int, draw: int) -> np.ndarray:
    """Numbers of the samples, int64 [classes * per_class].

    By sorting raw words of PCG64, a stream that NumPy keeps the same across its versions.
    """
    keys = np.random.PCG64(draw).random_raw(len(labels))
    chosen = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        if len(of_class) < per_class:
            raise ValueError(
                f"per_class is {per_class}, but there are {len(of_class)} samples of class {label}"
            )
        chosen.append(of_class[np.argsort(keys[of_class], kind="stable")[:per_class]])
    return np.concatenate(chosen)
