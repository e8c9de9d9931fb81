"""IDX files, plain or compressed with gzip: the format that MNIST and its likes come in."""

import gzip
import pathlib

import numpy as np

UNSIGNED_BYTE = 0x08  # the only kind of number that MNIST and its likes use


def find(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """The file `name`, or `name`.gz, in `folder`; None where neither is there."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def read(path: pathlib.Path) -> np.ndarray:
    """Return the array of an IDX file, uint8.

    The format, from http://yann.lecun.com/exdb/mnist: two bytes 0, the kind of number, how many
    dimensions there are, the length of each as four bytes, the most significant first; then the
    numbers, the last dimension running fastest.

    Raises:
        ValueError: it is no IDX file of unsigned bytes, or it has more or fewer of them than it
            says; the message names the file.
    """
    content = _content(path)
    if len(content) < 4 or content[0] or content[1]:
        raise ValueError(f"{path} is not an IDX file: it does not begin with two bytes 0")
    if content[2] != UNSIGNED_BYTE:
        raise ValueError(
            f"{path} holds numbers of kind {content[2]:#04x}, but must hold unsigned bytes, "
            f"{UNSIGNED_BYTE:#04x}"
        )
    head = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:head], dtype=">u4").tolist())
    count = int(np.prod(shape, dtype=np.int64))
    if len(shape) != content[3] or len(content) != head + count:
        raise ValueError(
            f"{path} says that it holds an array of {list(shape)}, {head + count} bytes in all, "
            f"but there are {len(content)}: fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


def _content(path: pathlib.Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, OSError) as error:  # cut short, or not compressed at all
        raise ValueError(f"{path} cannot be unpacked ({error}): fetch it again") from error
