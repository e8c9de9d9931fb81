"""Augmentations: what each does to an image, and that a sample's is a matter of its draws alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from phaseloop import (
    Affine,
    Blur,
    ColourJitter,
    DataError,
    Draws,
    Erase,
    Flip,
    Greyscale,
    Noise,
    ResizedCrop,
    Shift,
    Solarize,
)
from phaseloop.engine.data.augment import sample_keys
from phaseloop.engine.registry import augmentations

SIZE = 9  # odd, so that a pixel is in the middle
MIDDLE = SIZE // 2

EACH: dict[str, Callable[..., Any]] = {
    "affine": lambda: Affine(
        rotate=30, scale=(0.5, 2), shear=20, shift=0.2, padding="reflection", probability=0.8
    ),
    "resized_crop": lambda: ResizedCrop(probability=0.9),
    "shift": lambda: Shift(2),
    "flip": lambda: Flip(),
    "erase": lambda: Erase(),
    "blur": lambda: Blur(sigma=(0.3, 1.2)),
    "noise": lambda: Noise(),
    "colour_jitter": lambda: ColourJitter(0.4, 0.4, 0.4, 0.1, probability=0.8),
    "greyscale": lambda: Greyscale(0.5),
    "solarize": lambda: Solarize(probability=0.5),
}


class Fixed(Draws):
    """Draws that are given: one number for all, or one for each of a call's numbers."""

    def __init__(self, samples: int, *numbers: float) -> None:
        super().__init__(torch.zeros(samples, dtype=torch.int64))
        self.samples = samples
        self.numbers = [*numbers]

    def uniform(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        taken, self.numbers = self.numbers[:count], self.numbers[count:]
        return torch.tensor(taken).repeat(self.samples, 1).reshape(self.samples, *shape)


def draws(samples: int, first: int = 0) -> Draws:
    return Draws(sample_keys(1, first, samples, None))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(samples: int, channels: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(samples, channels, SIZE, SIZE + 2, generator=seeded()).to(dtype)


def ramp(across: bool = True) -> Tensor:
    """A square image [1, 1, SIZE, SIZE] whose value is the place, -1 to 1 from side to side."""
    places = (2 * torch.arange(SIZE) + 1) / SIZE - 1
    return (places if across else places[:, None]).expand(1, 1, SIZE, SIZE).clone()


def dot(down: int, across: int) -> Tensor:
    """A square image with one bright pixel, so far from its middle."""
    image = torch.zeros(1, 1, SIZE, SIZE)
    image[..., MIDDLE + down, MIDDLE + across] = 1
    return image


@pytest.mark.parametrize("name", [entry.name for entry in augmentations if entry.name in EACH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_is_changed_alike_in_a_batch_of_any_size(name: str, dtype: torch.dtype) -> None:
    given = images(20, dtype=dtype)
    before = given.clone()
    whole = EACH[name]()(given, draws(20))
    assert whole.dtype == dtype and whole.shape == given.shape
    assert torch.equal(given, before), "it wrote to what it was given"
    assert not torch.equal(whole, given)
    for first, last in ((0, 1), (1, 8), (8, 20)):
        part = EACH[name]()(given[first:last], draws(last - first, first))
        assert torch.equal(part, whole[first:last])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


LARGE = {**EACH, "contrast": lambda: ColourJitter(contrast=1.0)}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("two_threads")
def test_a_large_image_is_changed_alike_alone_and_in_a_batch(name: str) -> None:
    # Of 32,768 values and more torch divides the work among threads.
    given = torch.rand(2, 1 if name == "contrast" else 3, 224, 224, generator=seeded())
    whole = LARGE[name]()(given, draws(2))
    for sample in range(2):
        alone = LARGE[name]()(given[sample : sample + 1], draws(1, sample))
        assert torch.equal(alone, whole[sample : sample + 1])


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_at_the_end_alone(name: str, dtype: torch.dtype) -> None:
    # Large enough for torch's own resampling to be wrong in half precision.
    given = torch.rand(6, 3, 96, 80, generator=seeded()).to(dtype)
    found = EACH[name]()(given, draws(6))
    assert torch.equal(found, EACH[name]()(given.float(), draws(6)).to(dtype))


def test_all_of_ours_are_registered_and_tested() -> None:
    ours = {e.name for e in augmentations if e.target.__module__.startswith("phaseloop.engine")}
    assert ours == set(EACH)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Affine(rotate=90, probability=p),
        lambda p: ResizedCrop(probability=p),
        lambda p: Flip(p),
        lambda p: Erase(probability=p),
        lambda p: Blur(sigma=(0.5, 1.0), probability=p),
        lambda p: ColourJitter(0.5, probability=p),
        lambda p: Greyscale(p),
        lambda p: Solarize(probability=p),
    ],
)
def test_a_probability_is_the_share_of_images_that_change(make: Callable[..., Any]) -> None:
    given = images(400)
    changed = [
        float((make(p)(given, draws(400)) != given).flatten(1).any(1).float().mean())
        for p in (0.0, 0.3, 1.0)
    ]
    assert changed[0] == 0 and changed[2] == 1
    deviation = math.sqrt(0.3 * 0.7 / 400)
    assert abs(changed[1] - 0.3) < 4 * deviation


# --- of place ---


def test_affine_of_nothing_changes_nothing() -> None:
    given = images(5)
    torch.testing.assert_close(Affine()(given, draws(5)), given, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("turn", "quarters"), [(1.0, 1), (0.0, -1)])
def test_affine_turns_about_the_middle(turn: float, quarters: int) -> None:
    given = images(1)[..., :SIZE]
    found = Affine(rotate=90)(given, Fixed(1, turn, 0.5, 0.5, 0.5, 0.5))
    expected = torch.rot90(given, quarters, dims=(-2, -1))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_affine_keeps_distances_in_an_image_that_is_not_square() -> None:
    given = torch.zeros(1, 1, SIZE, 2 * SIZE + 1)
    given[..., MIDDLE, SIZE + 3] = 1  # three pixels to the right of the middle
    found = Affine(rotate=90)(given, Fixed(1, 1.0, 0.5, 0.5, 0.5, 0.5))
    assert found[..., MIDDLE - 3, SIZE].item() == pytest.approx(1, abs=1e-4)  # three above it


@pytest.mark.parametrize(("draw", "size"), [(0.0, 0.5), (0.5, 1.0), (1.0, 2.0)])
def test_affine_scales_evenly_on_a_logarithmic_scale(draw: float, size: float) -> None:
    found = Affine(scale=(0.5, 2), padding="border")(ramp(), Fixed(1, 0.5, 0.5, 0.5, 0.5, draw))
    inner = slice(MIDDLE - 1, MIDDLE + 2)  # what comes from inside the image at every size
    expected = ramp()[..., inner] / size
    torch.testing.assert_close(found[..., inner], expected, atol=1e-5, rtol=0)


def test_affine_shears_rows_against_each_other() -> None:
    found = Affine(shear=45)(dot(-2, 0), Fixed(1, 0.5, 1.0, 0.5, 0.5, 0.5))
    # Upright lines lean by 45 degrees: two rows up, two pixels to a side.
    torch.testing.assert_close(found, dot(-2, 2), atol=1e-4, rtol=0)


def test_affine_shifts_by_a_share_of_the_side() -> None:
    share = 2 / SIZE
    found = Affine(shift=share)(dot(0, 0), Fixed(1, 0.5, 0.5, 1.0, 0.0, 0.5))
    torch.testing.assert_close(found, dot(-2, 2), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("padding", "outside"), [("zeros", 0.0), ("border", 1.0)])
def test_affine_fills_what_comes_in(padding: str, outside: float) -> None:
    found = Affine(scale=(0.2, 0.2), padding=padding)(torch.ones(1, 1, SIZE, SIZE), draws(1))
    assert found[0, 0, 0, 0].item() == outside and found[0, 0, MIDDLE, MIDDLE].item() == 1


def test_resized_crop_takes_boxes_of_the_areas_and_ratios_asked_for() -> None:
    crop = ResizedCrop(area=(0.25, 0.5), ratio=(0.5, 2))
    samples = 300
    same = draws(samples), draws(samples)
    spans = []
    for across, numbers in zip((True, False), same, strict=True):
        found = crop(ramp(across).expand(samples, 1, SIZE, SIZE), numbers)
        assert found.abs().max() <= 1
        near, far = ((found[:, 0, i, i]) for i in (MIDDLE - 1, MIDDLE + 1))
        spans.append((far - near) * SIZE / 4)  # of two pixels, over that of the whole image
    width, height = spans
    area, ratio = width * height, width / height
    assert 0.25 - 1e-4 <= area.min() < 0.27 and 0.48 < area.max() <= 0.5 + 1e-4
    assert 0.5 - 1e-4 <= ratio.min() < 0.53 and 1.9 < ratio.max() <= 2 + 1e-3


def test_the_ratio_of_a_crop_is_one_of_pixels() -> None:
    height, width = 16, 64
    crop = ResizedCrop(area=(0.125, 0.125), ratio=(2.0, 2.0))  # 16 pixels wide, 8 high
    spans = []
    for size, dim in ((width, -1), (height, -2)):
        places = (torch.arange(size) + 0.5) / size
        given = (places if dim == -1 else places[:, None]).expand(5, 1, height, width)
        middle = crop(given, draws(5)).narrow(dim, size // 2 - 1, 2).select(-3 - dim, 8)
        spans.append(((middle[..., 1] - middle[..., 0]) * size * size).flatten())
    torch.testing.assert_close(spans[0], torch.full((5,), 16.0), atol=1e-2, rtol=0)
    torch.testing.assert_close(spans[1], torch.full((5,), 8.0), atol=1e-2, rtol=0)


def test_a_crop_that_would_not_fit_is_as_wide_as_the_image() -> None:
    crop = ResizedCrop(area=(1.0, 1.0), ratio=(4.0, 4.0))
    found = crop(ramp(), draws(1))
    torch.testing.assert_close(found, ramp(), atol=1e-5, rtol=0)


def test_shift_moves_by_whole_pixels_and_zeros_come_in() -> None:
    samples = 400
    given = (1 + images(1)).expand(samples, -1, -1, -1)
    found = Shift(1)(given, draws(samples))
    padded = torch.nn.functional.pad(given[:1], (1, 1, 1, 1))
    height, width = given.shape[-2:]
    counts = {
        (down, across): int(
            (found == padded[..., down : down + height, across : across + width])
            .flatten(1).all(1).sum()
        )
        for down in range(3)
        for across in range(3)
    }  # fmt: skip
    assert sum(counts.values()) == samples
    deviation = math.sqrt(samples * 1 / 9 * 8 / 9)
    assert all(abs(count - samples / 9) < 4 * deviation for count in counts.values())


def test_flip_mirrors() -> None:
    given = images(3)
    assert torch.equal(Flip(1.0)(given, draws(3)), given.flip(-1))
    assert torch.equal(Flip(1.0, vertical=True)(given, draws(3)), given.flip(-2))


def erased(erase: Erase, height: int, width: int, samples: int = 400) -> tuple[Tensor, Tensor]:
    """Height and width in pixels of the box written into each image."""
    found = erase(torch.zeros(samples, 2, height, width), draws(samples)) == 7
    assert torch.equal(found.any(1), found.all(1))  # all channels alike
    box = found[:, 0]
    tall, wide = box.any(2).sum(1), box.any(1).sum(1)
    assert torch.equal(box.flatten(1).sum(1), tall * wide)
    return tall, wide


def test_erase_writes_a_whole_box_wherever_it_is() -> None:
    side, samples = 8, 400
    erase = Erase(area=(0.25, 0.25), ratio=(1, 1), value=7.0, probability=1.0)
    tall, wide = erased(erase, side, side)
    assert {*tall.tolist(), *wide.tolist()} == {side // 2}
    found = erase(torch.zeros(samples, 1, side, side), draws(samples)) == 7
    for dim in (2, 3):
        firsts = found.any(5 - dim).int().argmax(-1)[:, 0]  # where the box begins
        counts = torch.bincount(firsts, minlength=side // 2 + 1)
        assert len(counts) == side // 2 + 1  # at each place where it fits
        deviation = math.sqrt(samples * 1 / 5 * 4 / 5)
        assert ((counts - samples / 5).abs() < 4 * deviation).all()


def test_erase_takes_areas_and_ratios_asked_for() -> None:
    erase = Erase(area=(0.04, 0.09), ratio=(0.5, 2), value=7.0, probability=1.0)
    height, width = 200, 300
    tall, wide = erased(erase, height, width)
    area, ratio = tall * wide / (height * width), wide / tall
    # Each side is rounded by half a pixel at most; the shortest is sqrt(0.04 * 60000 / 2).
    off = 1 + 1 / math.sqrt(0.02 * height * width)
    assert 0.04 / off <= area.min() < 0.042 and 0.088 < area.max() <= 0.09 * off
    assert 0.5 / off <= ratio.min() < 0.53 and 1.9 < ratio.max() <= 2 * off


def test_a_box_to_erase_that_would_not_fit_keeps_its_area() -> None:
    erase = Erase(area=(0.25, 0.25), ratio=(0.1, 0.1), value=7.0, probability=1.0)
    tall, wide = erased(erase, 8, 32)
    assert (tall == 8).all() and (wide == 8).all()


def test_erase_writes_a_pixel_at_least() -> None:
    erase = Erase(area=(1e-4, 1e-4), ratio=(1, 1), value=7.0, probability=1.0)
    tall, wide = erased(erase, 8, 8)
    assert (tall == 1).all() and (wide == 1).all()


# --- of value ---


def test_brightness_and_contrast_are_within_their_strengths() -> None:
    given = 0.25 + 0.25 * images(200, channels=1)
    brighter = ColourJitter(brightness=0.4)(given, draws(200)) / given
    assert brighter.amax() <= 1.4 + 1e-5 and brighter.amin() >= 0.6 - 1e-5
    assert brighter.amax() > 1.35 and brighter.amin() < 0.65
    harder = ColourJitter(contrast=0.4)(given, draws(200))
    mean = given.mean(dim=(1, 2, 3))
    torch.testing.assert_close(harder.mean(dim=(1, 2, 3)), mean)
    spread = harder.std(dim=(1, 2, 3)) / given.std(dim=(1, 2, 3))
    assert 0.6 - 1e-4 <= spread.min() < 0.65 and 1.35 < spread.max() <= 1.4 + 1e-4


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 3), (8, 8), (9, 13)])
def test_contrast_is_about_the_mean_brightness(size: tuple[int, int]) -> None:
    given = 0.25 + 0.5 * torch.rand(4, 1, *size, generator=seeded())
    found = ColourJitter(contrast=1.0)(given, Fixed(4, 0.5, 0.0, 0.5, 0.5))
    # At strength -1 nothing is left but the mean.
    expected = given.double().mean(dim=(1, 2, 3), keepdim=True).float().expand_as(given)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_saturation_takes_colours_out_and_leaves_brightness() -> None:
    given = images(1)
    found = ColourJitter(saturation=1.0)(given, Fixed(1, 0.5, 0.5, 0.0, 0.5))
    luma = 0.299 * given[:, :1] + 0.587 * given[:, 1:2] + 0.114 * given[:, 2:]
    torch.testing.assert_close(found, luma.expand(-1, 3, -1, -1), atol=1e-6, rtol=0)
    torch.testing.assert_close(Greyscale(1.0)(given, draws(1)), found, atol=1e-6, rtol=0)


def test_hue_turns_colours_and_leaves_brightness() -> None:
    given = 0.4 + 0.2 * images(1)  # so that no colour is cut off
    luma = torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]
    jitter = ColourJitter(hue=0.5)
    opposite = jitter(given, Fixed(1, 0.5, 0.5, 0.5, 1.0))
    torch.testing.assert_close((opposite * luma).sum(1), (given * luma).sum(1), atol=1e-4, rtol=0)
    # Half a turn: the colour's difference to its grey is its opposite.
    grey = (given * luma).sum(1, keepdim=True)
    torch.testing.assert_close(opposite - grey, grey - given, atol=1e-3, rtol=0)
    again = jitter(opposite, Fixed(1, 0.5, 0.5, 0.5, 1.0))
    torch.testing.assert_close(again, given, atol=1e-3, rtol=0)
    plain = images(1, channels=1).expand(1, 3, -1, -1)
    torch.testing.assert_close(jitter(plain, draws(1)), plain, atol=1e-4, rtol=0)


def test_colours_are_cut_to_0_and_1() -> None:
    found = ColourJitter(brightness=1.0)(images(50), draws(50))
    assert found.max() == 1 and found.min() >= 0


def test_solarize_turns_what_is_bright() -> None:
    given = images(1)
    expected = torch.where(given >= 0.6, 1 - given, given)
    assert torch.equal(Solarize(0.6, probability=1.0)(given, draws(1)), expected)


def test_noise_has_a_strength_of_its_own_for_each_image() -> None:
    samples, std = 400, 0.2
    found = Noise(std)(torch.zeros(samples, 1, 30, 30), draws(samples))
    strength = found.std(dim=(1, 2, 3))
    # Uniform from 0 to std; each estimated from 900 numbers, to about 1/sqrt(1800) of itself.
    assert strength.max() < std * (1 + 4 / math.sqrt(1800))
    deviation = std / math.sqrt(12 * samples)
    assert abs(strength.mean() - std / 2) < 4 * deviation
    assert found.mean().abs() < 4 * std / math.sqrt(3) / math.sqrt(samples * 900)


def test_blur_is_a_gaussian_of_the_width_asked_for() -> None:
    side, sigma = 25, 1.5
    given = torch.zeros(1, 1, side, side)
    given[..., side // 2, side // 2] = 1
    found = Blur(sigma=(sigma, sigma), probability=1.0)(given, draws(1))[0, 0]
    assert found.sum().item() == pytest.approx(1, abs=1e-5)
    # Cut off at two deviations a Gaussian's own deviation is a little smaller.
    reach = math.ceil(2 * sigma)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(-reach, reach + 1)]
    expected = sum(w * i**2 for w, i in zip(weights, range(-reach, reach + 1), strict=True))
    places = torch.arange(side) - side // 2
    for dim in (0, 1):
        variance = (found.sum(dim) * places**2).sum().item()
        assert variance == pytest.approx(expected / sum(weights), abs=1e-4)
    even = torch.full((2, 1, SIZE, SIZE), 0.3)
    torch.testing.assert_close(Blur(probability=1.0)(even, draws(2)), even)


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Affine(rotate=181), "rotate is 181"),
        (lambda: Affine(shear=90), "shear is 90"),
        (lambda: Affine(scale=(0, 1)), r"scale is \[0, 1\]"),
        (lambda: Affine(scale=(2, 1)), r"scale is \[2, 1\]"),
        (lambda: Affine(scale=[1.0]), r"scale is \[1.0\]"),
        (lambda: Affine(shift=2), "shift is 2"),
        (lambda: Affine(padding="zeroes"), "padding is 'zeroes', but must be one of zeros"),
        (lambda: ResizedCrop(area=(0.2, 1.5)), r"area is \[0.2, 1.5\].* at most 1"),
        (lambda: ResizedCrop(ratio=(0, 1)), "ratio"),
        (lambda: Shift(-1), "pixels is -1"),
        (lambda: Flip(1.1), "probability is 1.1"),
        (lambda: Erase(area=(0, 0.1)), "area"),
        (lambda: Blur(sigma=(0, 1)), "sigma"),
        (lambda: Noise(-1), "std is -1"),
        (lambda: ColourJitter(brightness=1.5), "brightness is 1.5"),
        (lambda: ColourJitter(hue=0.6), "hue is 0.6"),
        (lambda: Solarize(threshold=-1), "threshold is -1"),
    ],
)
def test_options_out_of_range_are_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize("name", EACH)
def test_what_is_no_image_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"must be \[B, C, H, W\], and they are \[4, 9\]"):
        EACH[name]()(torch.zeros(4, 9), draws(4))


@pytest.mark.parametrize(
    ("augment", "channels"),
    [(ColourJitter(saturation=0.1), 1), (ColourJitter(hue=0.1), 1), (Greyscale(), 2)],
)
def test_colours_need_their_channels(augment: Any, channels: int) -> None:
    with pytest.raises(DataError, match="channels"):
        augment(images(2, channels), draws(2))
