"""Two ways to read a text: lanes side by side, for a state that is carried on; and windows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from phaseloop import register_dataset

from . import text as texts

IGNORED = -100
"""Target of a character that does not count, as torch's cross-entropy has it."""

Batch = tuple[Tensor, Tensor]


class _Characters(Dataset[Batch]):
    """What both have: a part of a text, of which sample ``i`` is read by ``fetch``."""

    def __init__(self, split: str, text: str, length: int) -> None:
        if split not in texts.SPLITS:
            raise ValueError(f"split is {split!r}, but must be one of {', '.join(texts.SPLITS)}")
        if length < 1:
            raise ValueError(f"length is {length}, but must be at least 1")
        found = texts.load(text)
        self.codes = found.codes
        self.length = length
        # The first of all characters has nothing before it to be told from.
        self.first, self.end = (1, found.cut) if split == "train" else (found.cut, len(found.codes))
        self.count = self.end - self.first  # characters to be told
        self.fingerprint = found.sha256
        if self.count < 1:
            raise ValueError(f"text is {text!r}, whose {split} part has no characters")

    def __getitem__(self, index: int) -> Batch:
        x, y = self.fetch(torch.tensor([index]))
        return x[0], y[0]

    def fetch(self, indices: Tensor) -> Batch:
        raise NotImplementedError


@register_dataset("char_lanes")
class CharLanes(_Characters):
    """A part of a text in ``lanes`` equal pieces, read side by side: for the step ``tbptt``.

    Sample ``c * lanes + k`` is chunk c of lane k: characters int64 [T], and the ones after them,
    int64 [T]. In order and with ``batch_size: lanes``, each batch goes on where the one before it
    ended. T is ``length``, and less for the last chunk of all lanes. Characters that do not
    divide, fewer than ``lanes`` at the very end, are left out.

    Args:
        split: ``train`` or ``test``.
        lanes: how many.
        length: characters of a chunk.
        text: see :func:`phaseloop.recipes.char_lm.text.load`.
    """

    def __init__(self, split: str, lanes: int, length: int, text: str = texts.PYTHON) -> None:
        super().__init__(split, text, length)
        if not 1 <= lanes <= self.count:
            raise ValueError(f"lanes is {lanes}, but must be from 1 to {self.count}")
        self.lanes = lanes
        self.lane_length = self.count // lanes

    def __len__(self) -> int:
        return -(-self.lane_length // self.length) * self.lanes

    def fetch(self, indices: Tensor) -> Batch:
        """Samples of one chunk, int64 [B], as input and target, both int64 [B, T]."""
        chunks = indices // self.lanes
        chunk = int(chunks[0])
        if not bool((chunks == chunk).all()):
            raise ValueError(
                f"a batch takes samples of several chunks of the {self.lanes} lanes: set "
                f"batch_size to {self.lanes} and shuffle to false"
            )
        start = chunk * self.length
        steps = torch.arange(start, min(start + self.length, self.lane_length))
        places = self.first + (indices % self.lanes * self.lane_length)[:, None] + steps
        return self.codes[places - 1], self.codes[places]


@register_dataset("char_windows")
class CharWindows(_Characters):
    """Windows of a part of a text: for a model that sees ``length`` characters at once.

    A sample is characters int64 [length], and the ones after them, int64 [length]. In the training
    part a window begins at every ``stride``-th character. In the test part each character counts
    exactly once: a window ends ``stride`` characters after the one before it, and targets that
    counted there are -100, which the loss leaves out. So a character is told from at least
    ``length - stride + 1`` others; those before the test part are the end of the training part.

    Args:
        split: ``train`` or ``test``.
        length: characters of a window.
        stride: from one window to the next; by default ``length``.
        text: see :func:`phaseloop.recipes.char_lm.text.load`.
    """

    def __init__(
        self, split: str, length: int, stride: int | None = None, text: str = texts.PYTHON
    ) -> None:
        super().__init__(split, text, length)
        stride = length if stride is None else stride
        if not 1 <= stride <= length:
            raise ValueError(f"stride is {stride}, but must be from 1 to length, {length}")
        self.stride = stride
        self.counts_once = split == "test"
        if self.counts_once:
            self.windows = -(-self.count // stride)
            before = self.first + min(stride, self.count)  # the first window ends there
        else:
            self.windows = (self.count - length) // stride + 1
            before = self.first + self.count
        if before <= length:
            raise ValueError(
                f"length is {length}, but before the end of the first window of the {split} part "
                f"are {before} characters"
            )

    def __len__(self) -> int:
        return self.windows

    def fetch(self, indices: Tensor) -> Batch:
        """Samples ``indices``, int64 [B], as input and target, both int64 [B, length]."""
        fresh = self.first + indices * self.stride  # the first character that counts
        if self.counts_once:
            starts = (fresh + self.stride).clamp(max=self.end) - self.length
        else:
            starts = fresh
        places = starts[:, None] + torch.arange(self.length)
        target = self.codes[places]
        if self.counts_once:
            target = target.masked_fill(places < fresh[:, None], IGNORED)
        return self.codes[places - 1], target
