"""Remake mnist1d.npz: the standard 4,000 + 1,000 signals of MNIST-1D, by its own generator.

Run it by hand, with the package `mnist1d` installed; training only ever reads the file it leaves:

    python recipes/mnist1d/make_data.py

The file has two arrays, the training part first:

    signals  float16 [5000, 40]   standardised over the whole set
    labels   uint8 [5000]         the digit, 0 to 9
"""

import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_name("mnist1d.npz")


def main() -> None:
    """Write mnist1d.npz beside this file and say what is in it."""
    # Only this script needs the package, so that only whoever runs it has to have it.
    from mnist1d.data import get_dataset_args, make_dataset

    made = make_dataset(get_dataset_args())
    signals = np.concatenate([made["x"], made["x_test"]]).astype(np.float16)
    labels = np.concatenate([made["y"], made["y_test"]]).astype(np.uint8)
    np.savez_compressed(PATH, signals=signals, labels=labels)
    print(f"{PATH.name}: {len(labels)} signals, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
