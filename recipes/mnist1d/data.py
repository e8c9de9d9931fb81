"""MNIST-1D as a dataset in memory: signals of 40 numbers, each a digit."""

from __future__ import annotations

import pathlib

import numpy as np
import torch

from phaseloop import TensorData, register_dataset

PATH = pathlib.Path(__file__).with_name("mnist1d.npz")
SPLITS = ("train", "test")
TRAINING = 4000  # signals, the first of the file; the other 1,000 are for testing


@register_dataset("mnist1d")
class Mnist1D(TensorData):
    """One split: signals float32 [N, 1, 40] and labels int64 [N], 0 to 9.

    Args:
        split: "train" (4,000 samples) or "test" (1,000 samples).
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
        rows = slice(TRAINING) if split == "train" else slice(TRAINING, None)
        with np.load(PATH, allow_pickle=False) as file:
            signals = file["signals"][rows, None].astype(np.float32)
            self.targets = file["labels"][rows].astype(np.int64)  # what a sampler goes by
        super().__init__(torch.from_numpy(signals), torch.from_numpy(self.targets))
