"""The King James Bible as Debian's package `sword-text-kjv` has it, in SWORD's format zText."""

from __future__ import annotations

import re
import struct
import zlib
from html import unescape
from pathlib import Path

TESTAMENTS = ("ot", "nt")

# Notes and titles are not the text: they go with what is in them. Of all other marks only the
# marks themselves go, as do the signs that begin a paragraph, and what the package has left over
# of the format that it was made from, such as `\nd `.
_APART = re.compile(r"<(note|title)\b(?:[^>]*/>|.*?</\1>)", re.DOTALL)
_MARK = re.compile(r"<[^>]*>|¶|\\\w+\*?\s?")


def read(folder: Path) -> str:
    """The text, a line for each of its 31,102 verses.

    For each testament, ``.bzz`` has blocks that zlib packed; ``.bzs`` has, for each block, its
    place there and its sizes packed and whole, as three unsigned 32-bit numbers; ``.bzv`` has, for
    each verse, the number of its block, its place in that (32 bits each) and its size (16 bits).
    All are little-endian. Entries that are headings of books and chapters have no words left.

    Raises:
        ValueError: a file is missing or damaged.
    """
    lines = []
    for testament in TESTAMENTS:
        try:
            packed, places, entries = (
                (folder / f"{testament}.{ending}").read_bytes() for ending in ("bzz", "bzs", "bzv")
            )
            blocks = [
                _unpacked(packed[start : start + size], whole)
                for start, size, whole in struct.iter_unpack("<III", places)
            ]
            for block, start, size in struct.iter_unpack("<IIH", entries):
                words = _plain(_part(blocks[block], start, size)) if size else ""
                if words:
                    lines.append(words)
        except OSError as error:
            raise ValueError(f"{folder} lacks a file of the package: {error}") from None
        except (zlib.error, struct.error, IndexError, ValueError) as error:
            raise ValueError(f"{folder}: the files {testament}.* are damaged: {error}") from None
    return "".join(f"{line}\n" for line in lines)


def _unpacked(packed: bytes, size: int) -> bytes:
    """A block, of which no more is unpacked than there should be."""
    unpacker = zlib.decompressobj()
    block = unpacker.decompress(packed, size + 1)
    if len(block) != size or not unpacker.eof:
        raise ValueError(f"a block has not the {size} bytes that it should have")
    return block


def _part(block: bytes, start: int, size: int) -> str:
    if start + size > len(block):
        raise ValueError(f"bytes {start} to {start + size} of a block of {len(block)}")
    return block[start : start + size].decode()


def _plain(marked: str) -> str:
    """The words of a verse in OSIS, with one space between them."""
    return " ".join(unescape(_MARK.sub("", _APART.sub("", marked))).split())
