"""Colours of runs: told apart with any kind of eyes, the same everywhere for one run."""

from __future__ import annotations

# M. Okabe, K. Ito, "Color Universal Design" (2008), without the yellow and the black.
_FEW = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def colours(count: int) -> list[str]:
    """So many colours; of many runs neighbours are alike, in the order of matplotlib's viridis."""
    if count <= len(_FEW):
        return list(_FEW[:count])
    import matplotlib
    from matplotlib.colors import to_hex

    scale = matplotlib.colormaps["viridis"]
    return [to_hex(scale(0.92 * number / (count - 1))) for number in range(count)]
