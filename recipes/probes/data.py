"""The test set of a probe: labelled samples to learn from, and samples to be asked about."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from phaseloop import register_dataset

BANK, QUERY = 0, 1


@register_dataset("probe_set")
class ProbeSet(Dataset):
    """Two datasets, one after the other, as one test set for the meter ``probe``.

    A sample is ``(image, target)``, where target is int64 [3]: the label; the part, 0 for the bank
    and 1 for the queries; and the position in the set, by which the meter knows the order.

    Args:
        bank: map-style dataset of (image, label) whose labels a probe may learn from: the training
            images, without augmentation.
        queries: the same, of what it is asked about: the test images.
    """

    def __init__(self, bank: Any, queries: Any) -> None:
        self.parts = (bank, queries)
        self._in_bank = len(bank)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        """Sample ``index``: the image as its dataset gives it, and the target int64 [3]."""
        part = int(index >= self._in_bank)
        image, label = self.parts[part][index - part * self._in_bank]
        return image, torch.tensor([int(label), part, index])

    @property
    def fetch(self) -> Any:
        """``fetch(indices)`` gives a whole batch, where both datasets can.

        Images as the datasets give them, in the order of ``indices``; targets int64 [B, 3].
        """
        fetches = [part.fetch for part in self.parts]  # AttributeError: one cannot

        def fetch(indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
            indices = torch.as_tensor(indices)
            part = (indices >= self._in_bank).long()
            found = []
            for number, one in enumerate(fetches):
                mine = (part == number).nonzero().flatten()
                if len(mine):
                    found.append((mine, *one(indices[mine] - number * self._in_bank)))
            order = torch.cat([places for places, _, _ in found]).argsort()
            images = torch.cat([images for _, images, _ in found])[order]
            labels = torch.cat([labels for _, _, labels in found])[order]
            return images, torch.stack([labels.long(), part, indices], dim=1)

        return fetch
