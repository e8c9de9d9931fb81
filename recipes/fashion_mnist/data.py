"""Fashion-MNIST as a map-style dataset: held in memory as bytes, read a batch at a time."""

import pathlib

import numpy as np
import torch
from torch.utils.data import Dataset

from phaseloop import register_dataset
from phaseloop.recipes import fetched

from . import idx

FILES = {"train": "train", "test": "t10k"}  # what the names of each split's files begin with
SIZE = 28  # pixels on each side of an image
FETCHED = (
    "`make data` in a checkout of phaseloop fetches Fashion-MNIST, Debian's package "
    "dataset-fashion-mnist, which `apt-get download` and `dpkg-deb -x` do elsewhere"
)
FULL = 255  # the largest pixel value in the files
CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


@register_dataset("fashion_mnist")
class FashionMNIST(Dataset):
    """One split of Fashion-MNIST, or of any set in the same files, such as MNIST itself.

    A sample is `(image, label)`: a float32 tensor [1, 28, 28] with the brightness of each pixel
    from 0 (background) to 1, and the class as an int, see `CLASSES`.

    Args:
        split: "train" (60,000 samples) or "test" (10,000 samples).
        root: the folder of the four IDX files, each plain or with .gz at the end of its name. None:
            `data/fashion-mnist` in the current folder, or where it is not there, what `make data`
            has put into the user's cache.
        samples: only so many of the split, its first; None: all.

    Raises:
        ValueError: a file is missing, damaged, or not of such images, which the message names; or
            `samples` is out of range.
    """

    def __init__(self, split: str, root: str | None = None, samples: int | None = None) -> None:
        if split not in FILES:
            raise ValueError(f"split is {split!r}, but must be one of {', '.join(FILES)}")
        folder = folder_of(root)
        images = _read(folder, f"{FILES[split]}-images-idx3-ubyte")
        labels = _read(folder, f"{FILES[split]}-labels-idx1-ubyte")
        if images.shape[1:] != (SIZE, SIZE) or labels.shape != images.shape[:1]:
            raise ValueError(
                f"root: {folder} has images {list(images.shape)} and labels {list(labels.shape)}, "
                f"but must have [N, {SIZE}, {SIZE}] and [N]"
            )
        if len(labels) and labels.max() >= len(CLASSES):
            raise ValueError(
                f"root: {folder} has a label {labels.max()}, but they must be from 0 to "
                f"{len(CLASSES) - 1}"
            )
        if samples is not None and not 1 <= samples <= len(labels):
            raise ValueError(f"samples is {samples}, but must be from 1 to {len(labels)}")
        images, labels = images[:samples], labels[:samples]
        self.split = split
        self.targets = labels.astype(np.int64)  # [N], what a sampler goes by
        # Bytes: a quarter of the memory, and a batch is turned into floats when it is read.
        self._images = torch.from_numpy(images.copy()).unsqueeze(1)  # [N, 1, 28, 28]
        self._labels = torch.from_numpy(self.targets)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return sample `index`: image float32 [1, 28, 28] and label 0..9."""
        return self._images[index].float().div_(FULL), int(self._labels[index])

    def fetch(self, indices: torch.Tensor | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole batch: images float32 [B, 1, 28, 28] and labels int64 [B].

        `indices` are B whole numbers, as an int64 tensor [B] or a list.
        """
        indices = torch.as_tensor(indices)
        # Not `[indices]`, which takes seven times as long.
        images = self._images.index_select(0, indices).float().div_(FULL)
        return images, self._labels.index_select(0, indices)


def folder_of(root: str | None = None) -> pathlib.Path:
    """The folder that the files are read from.

    Raises:
        ValueError: it is not there; the message names it, and the command that fetches it.
    """
    places = fetched.places("fashion-mnist")
    if root is not None:
        places = [pathlib.Path(root).expanduser()]
    missing = f"root: there is no folder {{}}. {FETCHED}; name the folder of its IDX files"
    return fetched.first_of(places, missing)


def _read(folder: pathlib.Path, name: str) -> np.ndarray:
    path = idx.find(folder, name)
    if path is None:
        raise ValueError(
            f"root: {folder.absolute()} has no file {name} or {name}.gz. {FETCHED}; name the "
            f"folder of its IDX files"
        )
    try:
        return idx.read(path)
    except ValueError as error:
        raise ValueError(f"root: {error}") from error
