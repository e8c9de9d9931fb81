"""Images: what is taken for one, and what becomes of its values; grids of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phaseloop import ConfigError, image_grid
from phaseloop.engine.backends import Single
from phaseloop.engine.shown import IMAGE, Shown


def given(image: Any, name: str = "picture") -> torch.Tensor:
    """What a sink gets."""
    shown, found = Shown(), []
    shown.sinks[IMAGE].append(lambda *args: found.append(args))
    shown.add_image(name, image)
    shown.give(7, Single())
    ((called, picture, update),) = found
    assert (called, update) == (name, 7) and not shown.waiting
    return picture


def test_shares_become_bytes_and_channels_come_last() -> None:
    image = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, float("nan")]).view(1, 2, 3)
    picture = given(image)
    # 0.5 * 255 = 127.5, which rounds to the even number.
    assert picture.dtype == torch.uint8 and picture.shape == (2, 3, 1)
    assert picture.flatten().tolist() == [0, 0, 128, 255, 255, 0]


def test_colours_and_bytes_stay_and_half_precision_is_taken() -> None:
    image = torch.arange(24, dtype=torch.uint8).view(3, 2, 4)
    assert torch.equal(given(image), image.permute(1, 2, 0))
    assert given(torch.ones(1, 1, 1, dtype=torch.bfloat16)).item() == 255


def test_a_picture_is_copied() -> None:
    shown, found = Shown(), []
    shown.sinks[IMAGE].append(lambda name, picture, update: found.append(picture))
    for image in (torch.ones(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.uint8)):
        shown.add_image("a", image)
        image.zero_()
        shown.give(1, Single())
    assert [picture.item() for picture in found] == [255, 1]


def test_where_nobody_writes_nothing_is_kept() -> None:
    shown = Shown()
    shown.add_image("a", torch.ones(1, 1, 1))
    assert not shown.waiting


@pytest.mark.parametrize(
    "image, problem",
    [
        (torch.zeros(8, 8), r"not \[8, 8\]"),
        (torch.zeros(8, 8, 3), r"not \[8, 8, 3\]"),
        (torch.zeros(4, 1, 8, 8), "image_grid"),
        (torch.zeros(1, 0, 8), "not"),
        (torch.zeros(1, 8, 8, dtype=torch.int64), "torch.int64"),
        ([[0.5]], "not a list"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(image: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        Shown().add_image("samples", image)
    assert "record_image('samples')" in str(error.value)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "a b", "ä"])
def test_a_name_that_is_no_files_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="file"):
        Shown().add_image(name, torch.zeros(1, 1, 1))


def test_a_grid_goes_row_by_row() -> None:
    images = torch.arange(1, 4).view(3, 1, 1, 1).float()
    assert image_grid(images, columns=2)[0].tolist() == [
        [0, 0, 0, 0, 0],
        [0, 1, 0, 2, 0],
        [0, 0, 0, 0, 0],
        [0, 3, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert image_grid(images, columns=8, gap=0).tolist() == [[[1, 2, 3]]]
    assert image_grid(images[:1], gap=0, scale=2).tolist() == [[[1, 1], [1, 1]]]


def test_a_grid_keeps_channels_and_sides() -> None:
    images = torch.rand(5, 3, 2, 4)
    whole = image_grid(images, columns=3, gap=2, scale=3)
    # Two rows of 2 * 3 pixels, three columns of 4 * 3; gaps of 2 between and around.
    assert whole.shape == (3, 2 * 6 + 3 * 2, 3 * 12 + 4 * 2)
    assert torch.equal(whole[:, 2:8:3, 2:14:3], images[0])
    assert torch.equal(whole[:, 10:16:3, 16:28:3], images[4])


@pytest.mark.parametrize(
    "shape, options",
    [((3, 8, 8), {}), ((0, 1, 8, 8), {}), ((1, 1, 8, 8), {"columns": 0}),
     ((1, 1, 8, 8), {"gap": -1}), ((1, 1, 8, 8), {"scale": 0})],
)  # fmt: skip
def test_a_grid_of_nothing_is_refused(shape: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"not|out of range"):
        image_grid(torch.zeros(shape), **options)
