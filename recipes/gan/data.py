"""The digits, each with the noise that images are made of in its place.

So noise belongs to a sample: however a batch is cut, over processes or micro-batches, it is the
same.
"""

import torch
from torch.utils.data import Dataset

from phaseloop import register_dataset
from phaseloop.recipes.digits import Digits

NOISE = 16  # numbers that one image is made of


@register_dataset("digits_and_noise")
class DigitsAndNoise(Dataset):
    """Samples `(image, noise)`: float32 [1, 8, 8], and float32 [draws, NOISE] of the normal law.

    Args:
        split: "train" (1,438 samples) or "test" (359 samples).
        draws: images that may be made for each sample.
        fixed: None: the noise is another at each read, from torch's generator, which the engine
            seeds for each sample; a number: it is always the same, from a generator of its own
            with this seed.
    """

    def __init__(self, split: str, draws: int = 2, fixed: int | None = None) -> None:
        if draws < 1:
            raise ValueError(f"draws is {draws}, but must be at least 1")
        self._digits = Digits(split)
        self._draws = draws
        self._fixed = None
        if fixed is not None:
            own = torch.Generator().manual_seed(fixed)
            self._fixed = torch.randn(len(self._digits), draws, NOISE, generator=own)

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sample `index`."""
        image, _ = self._digits[index]
        if self._fixed is not None:
            return image, self._fixed[index]
        return image, torch.randn(self._draws, NOISE)
