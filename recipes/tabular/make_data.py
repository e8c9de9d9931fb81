"""Remake diabetes.npz: 442 patients, ten measurements each, and how the disease went on.

Run it by hand, with scikit-learn installed; training only ever reads the file it leaves:

    python recipes/tabular/make_data.py

The file has three arrays, in scikit-learn's order of samples:

    features  float32 [442, 10]   as measured, in the units that the page lists
    targets   float32 [442]       progression of the disease one year later, 25 to 346
    test      bool [442]          True for the samples that are held out, a fifth of all
"""

import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_name("diabetes.npz")
TEST_FRACTION = 0.2
SPLIT_SEED = 0


def main() -> None:
    """Write diabetes.npz beside this file and say what is in it."""
    # Only this script needs scikit-learn, so that only whoever runs it has to have it.
    from sklearn.datasets import load_diabetes

    source = load_diabetes(scaled=False)
    # Sorting raw words of PCG64: NumPy keeps that stream the same across its versions, which it
    # does not promise for `Generator.permutation` and its like.
    keys = np.random.PCG64(SPLIT_SEED).random_raw(len(source.target))
    test = np.zeros(len(keys), dtype=bool)
    test[np.argsort(keys, kind="stable")[: round(TEST_FRACTION * len(keys))]] = True
    features, targets = source.data.astype(np.float32), source.target.astype(np.float32)
    np.savez_compressed(PATH, features=features, targets=targets, test=test)
    print(
        f"{PATH.name}: {len(targets)} patients, {(~test).sum()} train, {test.sum()} test, "
        f"{PATH.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
