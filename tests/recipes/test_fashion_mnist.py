"""Recipe fashion_mnist: its files are read as they are, and it learns."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from phaseloop.recipes.fashion_mnist import CLASSES, FashionCNN, FashionMLP, FashionMNIST, idx
from phaseloop.recipes.fashion_mnist.data import folder_of
from tests.recipes import rig


def write_idx(path: Path, array: np.ndarray) -> None:
    """An IDX file of unsigned bytes, as its format says; compressed where its name ends so."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_set(folder: Path, train: int = 40, test: int = 20, end: str = "") -> None:
    """Small files of the four names: the classes in turn, pixels drawn from a seed."""
    draws = np.random.default_rng(0)
    for name, samples in (("train", train), ("t10k", test)):
        images = draws.integers(0, 256, (samples, 28, 28))
        write_idx(folder / f"{name}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte{end}", np.arange(samples) % 10)


# --- reading ---


@pytest.mark.parametrize("end", ["", ".gz"])
def test_an_array_comes_back_as_it_was_written(tmp_path, end):
    array = np.random.default_rng(1).integers(0, 256, (3, 5, 2))
    write_idx(tmp_path / f"a{end}", array)
    found = idx.find(tmp_path, "a")
    assert found is not None
    assert np.array_equal(idx.read(found), array)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not begin"),
        (b"\x00\x01\x08\x01\x00\x00\x00\x01\x05", "does not begin"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x05", "0x0d"),  # 0x0d are floats
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "bytes in all"),  # a length is missing
        (b"\x00\x00\x08\x01\x00\x00\x00\x02\x05", "10 bytes in all, but there are 9"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x01\x05\x06", "9 bytes in all, but there are 10"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, said):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.*{said}"):
        idx.read(tmp_path / "bad")


def test_a_damaged_archive_is_named(tmp_path):
    whole = gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 5]))
    for content in (whole[:-9], b"no archive"):
        (tmp_path / "bad.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.gz cannot be unpacked"):
            idx.read(tmp_path / "bad.gz")


def test_the_first_so_many_samples(tmp_path):
    write_set(tmp_path)
    few, all_ = (FashionMNIST("train", root=str(tmp_path), samples=n) for n in (7, None))
    assert (len(few), len(few.targets), len(all_)) == (7, 7, 40)
    assert torch.equal(few.fetch(range(7))[0], all_.fetch(range(7))[0])
    for wrong in (0, 41):
        with pytest.raises(ValueError, match=f"samples is {wrong}, but must be from 1 to 40"):
            FashionMNIST("train", root=str(tmp_path), samples=wrong)


def test_samples_and_batches_agree(tmp_path):
    write_set(tmp_path, end=".gz")
    train, test = (FashionMNIST(split, root=str(tmp_path)) for split in ("train", "test"))
    assert (len(train), len(test)) == (40, 20)
    images, labels = train.fetch(torch.tensor([11, 3, 3]))
    assert images.shape == (3, 1, 28, 28) and images.dtype == torch.float32
    assert labels.tolist() == [1, 3, 3] and labels.dtype == torch.int64
    assert images.min() >= 0 and images.max() <= 1
    stored = idx.read(tmp_path / "train-images-idx3-ubyte.gz")
    assert torch.equal((images[0, 0] * 255).round(), torch.tensor(stored[11]).float())
    image, label = train[11]
    assert torch.equal(image, images[0]) and label == 1
    assert train.targets.tolist() == [n % len(CLASSES) for n in range(40)]
    assert torch.equal(train.fetch([11])[0], images[:1])


def test_files_that_are_no_such_images_are_refused(tmp_path):
    write_set(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    write_idx(labels, np.arange(39) % 10)
    with pytest.raises(ValueError, match=r"labels \[39\]"):
        FashionMNIST("train", root=str(tmp_path))
    write_idx(labels, np.arange(40) % 11)
    with pytest.raises(ValueError, match="a label 10"):
        FashionMNIST("train", root=str(tmp_path))
    with pytest.raises(ValueError, match="'validation'"):
        FashionMNIST("validation", root=str(tmp_path))


def test_where_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path / "cache"))
    wanted = "data/fashion-mnist and .*cache/data/fashion-mnist.*make data.*dataset-fashion-mnist"
    with pytest.raises(ValueError, match=wanted):
        folder_of()
    (tmp_path / "cache/data/fashion-mnist").mkdir(parents=True)
    assert folder_of() == tmp_path / "cache/data/fashion-mnist"
    (tmp_path / "data/fashion-mnist").mkdir(parents=True)
    assert folder_of() == Path("data/fashion-mnist")
    with pytest.raises(ValueError, match=r"elsewhere\. `make data`"):
        folder_of(str(tmp_path / "elsewhere"))


def test_missing_files_are_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path / "cache"))
    printed = rig.train(tmp_path, "config=fashion_mnist", code=2)
    wanted = f"wrong configuration: data.train.dataset: root: there is no folder {tmp_path}/data/"
    assert wanted in printed and "`make data`" in printed
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    printed = rig.train(tmp_path, "config=fashion_mnist", "data.train.dataset.root=mine", code=2)
    assert f"data.train.dataset: root: {tmp_path}/mine has no file train-images" in printed


# --- models ---


def test_models_have_the_parameters_that_they_are_known_for():
    # 3x3 weights, two numbers for each channel's norm, and the last layer.
    small = 9 * (1 * 16 + 16 * 32 + 32 * 64) + 2 * (16 + 32 + 64) + 65 * 10
    large = 9 * (1 * 16 + 16 * 32 + 32 * 32 + 32 * 48) + 2 * (16 + 32 + 32 + 48)
    large += (4 * 48 + 1) * 10  # of each quarter of the image
    assert small <= 26_000 and large <= 32_000
    for stages, pool, parameters in (
        ([[16], [32], [64]], 1, small),
        ([[16], [32, 32], [48]], 2, large),
    ):
        model = FashionCNN(stages, pool)
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert FashionMLP()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    for wrong in ([], [[]], [[16], []], [[0]]):
        with pytest.raises(ValueError, match="stages"):
            FashionCNN(wrong)
    with pytest.raises(ValueError, match="pool is 0"):
        FashionCNN([[16]], 0)


# --- training ---


@pytest.fixture(scope="module")
def real() -> list[str]:
    """Words for the real images, which are in `data/` of the tests' current folder or in the cache.

    Leaves out what needs them where they were not fetched.
    """
    try:
        folder = str(folder_of().absolute())
        for split in ("train", "test"):
            FashionMNIST(split, root=folder)
    except ValueError as error:
        pytest.skip(f"Fashion-MNIST is not on this machine: {error}")
    return [f"data.{split}.dataset.root={folder}" for split in ("train", "test")]


@pytest.fixture
def written(tmp_path) -> list[str]:
    """Words for small files of noise, on which nothing but exactness can be tested."""
    (tmp_path / "files").mkdir()
    write_set(tmp_path / "files", train=300, test=40)
    return [f"data.{split}.dataset.root={tmp_path / 'files'}" for split in ("train", "test")]


def test_a_killed_run_goes_on_exactly(tmp_path, written):
    words = ["config=fashion_mnist", "data.train.batch_size=30", "phases.epochs=1.5", *written]
    rig.resumes_exactly(tmp_path, *words, "hooks.checkpoint.every_updates=4", at=7)


def test_two_processes(tmp_path, written):
    words = ["config=fashion_mnist_mlp", "data.train.batch_size=30", "phases.epochs=1", *written]
    one = rig.final(tmp_path / "one", *words)
    two = rig.two_processes(tmp_path / "two", *words)
    # No batch norm in this one, so that both compute the same, but for the order of sums.
    assert two == pytest.approx(one, rel=1e-3)


# On 2,000 test images, seeds 0 to 4: the mean accuracy of each short form, and its deviation.
# The least that is asked is three deviations below the mean; blind guesses come to 0.1.
SHORT = {
    ("fashion_mnist_mlp", 150): (0.829, 0.011),
    ("fashion_mnist", 60): (0.744, 0.018),
}


@pytest.mark.parametrize(("name", "updates"), SHORT)
def test_it_learns(tmp_path, real, name, updates):
    mean, deviation = SHORT[name, updates]
    words = [f"phases.updates={updates}", "phases.test_every_epochs=1000", "data.test.limit=2000"]
    found = rig.final(tmp_path, f"config={name}", *words, *real)
    assert found["test/accuracy"] >= mean - 3 * deviation > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "epochs", "least"),
    [
        ("fashion_mnist_mlp", 3, 0.86),
        ("fashion_mnist", 1, 0.855),
        ("fashion_mnist", 4, 0.885),
        ("fashion_mnist_large", 3, 0.91),
    ],
)
def test_whole(tmp_path, real, name, epochs, least, seed):
    words = [f"config={name}", f"phases.epochs={epochs}", f"seed={seed}", *real]
    assert rig.final(tmp_path, *words)["test/accuracy"] >= least
