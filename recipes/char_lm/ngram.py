"""What counting reaches: bits per character of n-grams, by Witten and Bell's interpolation.

    python -m phaseloop.recipes.char_lm.ngram            # of the Python language reference
    python -m phaseloop.recipes.char_lm.ngram kjv

They are counted on the first nine tenths of a text, and measured on the last tenth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from phaseloop import ConfigError

from . import text as texts

LONGEST = 5


def bits(text: texts.Text, longest: int = LONGEST) -> Iterator[float]:
    """Bits per character on the last tenth of the 1-gram, the 2-gram, ... the ``longest``-gram.

    With N times of the context h in training, T different characters after it, and c times the one
    that came, its share is (c + T q) / (N + T), where q is its share by the context that is one
    character shorter; below the 1-gram all symbols share alike (Witten, Bell, "The zero-frequency
    problem", IEEE Transactions on Information Theory, 1991, method C).
    """
    codes = text.codes.numpy()
    trained = np.arange(text.cut)
    told = np.arange(text.cut, len(codes))
    share = np.full(len(told), 1 / texts.SYMBOLS)
    for context in range(longest):
        own = trained[context:]
        before, times = np.unique(_keys(codes, own - context, context), return_counts=True)
        grams, counts = np.unique(_keys(codes, own - context, context + 1), return_counts=True)
        kinds = np.bincount(np.searchsorted(before, grams // texts.SYMBOLS))
        here = _keys(codes, told - context, context)
        n, t = _look_up(before, times, here), _look_up(before, kinds, here)
        c = _look_up(grams, counts, here * texts.SYMBOLS + codes[told])
        share = np.where(n > 0, (c + t * share) / np.maximum(n + t, 1), share)
        yield float(-np.log2(share).mean())


def _keys(codes: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """A number for the ``length`` characters from each of the starts on."""
    keys = np.zeros(len(starts), dtype=np.int64)
    for offset in range(length):
        keys = keys * texts.SYMBOLS + codes[starts + offset]
    return keys


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key; 0 where it is not among the sorted keys."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def main(words: Sequence[str]) -> int:
    """Print a line for each length; the exit code."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        if len(words) > 1:
            raise ConfigError("", f"give one text, or none; got {' '.join(words)}")
        text = texts.load(words[0] if words else texts.PYTHON)
    except (ConfigError, ValueError) as error:
        print(f"wrong arguments: {error}", file=sys.stderr)
        return 2
    print(f"{text.cut:,} characters to count, {len(text.codes) - text.cut:,} to tell")
    for length, value in enumerate(bits(text), 1):
        print(f"{length}-gram  {value:.4f} bits per character")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
