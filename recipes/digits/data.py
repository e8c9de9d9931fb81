"""The digits as a map-style dataset: held in memory, scaled to 0..1, shifted at random if asked."""

import pathlib
import random

import numpy as np
import torch
from torch.utils.data import Dataset

from phaseloop import register_dataset

PATH = pathlib.Path(__file__).with_name("digits.npz")
SPLITS = ("train", "test")
SIZE = 8  # pixels on each side of an image
FULL_INK = 16  # the largest pixel value in the file


@register_dataset("digits")
class Digits(Dataset):
    """One split of the handwritten digits of digits.npz.

    A sample is `(image, label)`: a float32 tensor [1, 8, 8] with the ink in each pixel from 0 to 1,
    and the digit as an int. Paper is 0, so that the zeros which a shift or a convolution pads with
    are paper too. The image is a view of the dataset's own memory: copy it before writing to it.

    Args:
        split: "train" (1,438 samples) or "test" (359 samples).
        max_shift: the largest shift, in pixels, 0 to 7. Where it is above 0 every read of a sample
            moves the image by a whole number of pixels from -max_shift to max_shift, down and
            across, drawn from Python's `random`; what leaves the frame is lost.
    """

    def __init__(self, split: str, max_shift: int = 0) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
        # bool is an int to Python; a setting of `true` is more likely a slip than a shift of 1.
        if isinstance(max_shift, bool) or not isinstance(max_shift, int):
            raise ValueError(f"max_shift is {max_shift!r}, but must be a whole number of pixels")
        if not 0 <= max_shift < SIZE:
            raise ValueError(f"max_shift is {max_shift}, but must be from 0 to {SIZE - 1}")
        with np.load(PATH, allow_pickle=False) as file:
            rows = file["test"] if split == "test" else ~file["test"]
            images = file["images"][rows].astype(np.float32) / FULL_INK
            labels = file["labels"][rows].astype(np.int64)
        self.split = split
        self.max_shift = max_shift
        self._starts = 2 * max_shift + 1  # how many places a cut can start at, down or across
        margin = (max_shift, max_shift)
        # [N, 1, 8 + 2 * max_shift, 8 + 2 * max_shift]; kept in NumPy since slicing there and
        # wrapping the result takes a third of the time of slicing a tensor.
        self._padded = np.pad(images[:, None], ((0, 0), (0, 0), margin, margin))
        self.targets = labels  # [N], what a sampler goes by
        self._labels = labels.tolist()
        self._label_tensor = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return sample `index`: image float32 [1, 8, 8] and label 0..9."""
        image = self._padded[index]
        if self.max_shift:
            top = random.randrange(self._starts)
            left = random.randrange(self._starts)
            image = image[:, top : top + SIZE, left : left + SIZE]
        return torch.from_numpy(image), self._labels[index]

    @property
    def fetch(self):
        """`fetch(indices)` returns a whole batch: images float32 [B, 1, 8, 8], labels int64 [B].

        `indices` are B whole numbers, as an int64 tensor [B] or a list.

        It exists only where samples are not random (`max_shift` is 0), so that `hasattr` tells
        whether a batch may be read at once. Shifted samples must be read one by one, each after
        the random generators were seeded for it.
        """
        if self.max_shift:
            raise AttributeError("fetch: shifted samples must be read one at a time")
        return self._fetch

    def _fetch(self, indices: torch.Tensor | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self._padded)[indices], self._label_tensor[indices]
