"""The texts: where each comes from, its SHA-256, its split, and its characters as numbers.

A text is cut once: the first nine tenths of its characters are for training, the last tenth is for
testing.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phaseloop.recipes import fetched

from . import kjv

PYTHON = "python"
KJV = "kjv"
IN_PACKAGE = "usr/share/sword/modules/texts/ztext/engKJV2006eb"

SHA256 = {
    PYTHON: "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4",
    KJV: "01906c513feb98a65d901398b06b0a24cb9e1e0229c2163053f83b0b0121cb64",
}
"""Of the texts that the page's figures were made with: CPython 3.11.7's, and Debian's 14.3-1."""

SYMBOLS = 97
"""Printable ASCII, from space to ``~``, is 0 to 94; a line's end is 95, any other character 96."""

LINE_END = 95
OTHER = 96

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Text:
    """A text as numbers.

    Attributes:
        codes: int64 [N], one of :data:`SYMBOLS` for each character.
        cut: position of the first character of the last tenth.
        sha256: of the text in UTF-8.
    """

    codes: Tensor
    cut: int
    sha256: str


def load(name: str) -> Text:
    """A text by its name.

    Args:
        name: ``python``, the language reference that this Python has in ``pydoc_data.topics``;
            ``kjv``, the King James Bible, which ``make data`` fetches; or the path of a file in
            UTF-8.

    Warns:
        UserWarning: it is not the text that the page's figures were made with, with both hashes.

    Raises:
        ValueError: there is no such file, or it cannot be read.
    """
    readers = {PYTHON: _language_reference, KJV: lambda: kjv.read(_folder_of_kjv())}
    text = readers[name]() if name in readers else _file(Path(name))
    found = hashlib.sha256(text.encode()).hexdigest()
    expected = SHA256.get(name, found)
    if found != expected:
        warnings.warn(
            f"char_lm: text {name!r} is not the one that the recipe's figures were made with: its "
            f"SHA-256 is {found} (here: Python {sys.version.split()[0]}), theirs {expected}. "
            f"Figures will differ",
            stacklevel=2,
        )
    return Text(encode(text), len(text) * 9 // 10, found)


def _language_reference() -> str:
    """All topics in the order of their names, which does not depend on how they are stored."""
    from pydoc_data.topics import topics  # late: half a megabyte

    return "\n".join(topics[name] for name in sorted(topics))


def _folder_of_kjv() -> Path:
    """``data/kjv`` in the current folder, or what ``make data`` has put into the user's cache."""
    return fetched.first_of(
        fetched.places("kjv"),
        f"text is {KJV!r}, but there is no folder {{}}: `make data` fetches it, in a checkout "
        f"of phaseloop; elsewhere `apt-get download` and `dpkg-deb -x` Debian's package "
        f"sword-text-kjv, and make data/kjv a link to its folder {IN_PACKAGE}",
    )


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f"{PYTHON}, {KJV}, or the path of a file in UTF-8"
        raise ValueError(f"text is {str(path)!r}, but must be {names}: {error}") from None


def encode(text: str) -> Tensor:
    """Characters as numbers, int64 [len(text)]; what is not ASCII is :data:`OTHER`."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.int64)
    codes = np.full_like(points, OTHER)
    printable = (points >= ord(" ")) & (points <= ord("~"))
    codes[printable] = points[printable] - ord(" ")
    codes[points == ord("\n")] = LINE_END
    return torch.from_numpy(codes)


def decode(codes: list[int]) -> str:
    """The reverse; :data:`OTHER` becomes the Unicode replacement character."""
    special = {LINE_END: "\n", OTHER: "\N{REPLACEMENT CHARACTER}"}
    return "".join(special.get(code) or chr(code + ord(" ")) for code in codes)
