"""Remake digits.npz: 1,797 real handwritten digits with a fixed, stratified 80/20 split.

Run it by hand, with scikit-learn installed; training only ever reads the file it leaves:

    python recipes/digits/make_data.py

The file has three arrays, in scikit-learn's order of samples:

    images  uint8 [1797, 8, 8]   ink in each pixel, 0 (paper) to 16 (full)
    labels  uint8 [1797]         the digit, 0 to 9
    test    bool  [1797]         True for the samples that are held out, about 20 % of each digit
"""

import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_name("digits.npz")
TEST_FRACTION = 0.2
SPLIT_SEED = 0


def stratified_test_mask(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return a bool mask [N] that holds out `fraction` of each class of `labels` [N].

    The order comes from sorting raw 64-bit words of PCG64: NumPy keeps that stream the same across
    its versions, which it does not promise for `Generator.permutation` and its like.
    """
    keys = np.random.PCG64(seed).random_raw(len(labels))
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(keys[members], kind="stable")]
        mask[members[: round(fraction * len(members))]] = True
    return mask


def main() -> None:
    """Write digits.npz beside this file and say what is in it."""
    # Only this script needs scikit-learn, so that only whoever runs it has to have it.
    from sklearn.datasets import load_digits

    source = load_digits()
    images = source.images.astype(np.uint8)
    labels = source.target.astype(np.uint8)
    if not np.array_equal(images, source.images):
        raise ValueError("the source images are no longer whole numbers that fit uint8")
    test = stratified_test_mask(labels, TEST_FRACTION, SPLIT_SEED)
    np.savez_compressed(PATH, images=images, labels=labels, test=test)
    print(
        f"{PATH.name}: {len(labels)} images, {(~test).sum()} train, {test.sum()} test, "
        f"{PATH.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
