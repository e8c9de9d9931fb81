"""Recipe gan: it learns, averaged weights beat raw ones late and lose early; resumes, processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchmetrics.image.fid import FrechetInceptionDistance

from phaseloop.engine.checkpoint import store
from phaseloop.recipes.digits import Digits
from phaseloop.recipes.gan import NOISE, DigitsAndNoise, Frechet, HingeLosses, Judge, Samples
from phaseloop.recipes.gan.model import DigitsGAN, Spread
from tests.recipes import rig
from tests.rigs import equal

UNTRAINED = 290.5
"""The distance of an untrained generator, of recipes/gan/README.md."""
NOISE_ITSELF = 156.0
"""The distance of images of uniform noise: less has learnt some shapes; the short form has 114."""
LEARNED = 38.0
"""The long form's is 21.6 over seeds 0 to 4 (18.7 to 24.2): the mean and three times the range."""
WORDS = ("config=gan_digits",)
SPLITS = (("train", 1438), ("test", 359))


def distance(state: dict[str, Any]) -> float:
    """The meter's, for a model's state, on the test set with its fixed noise."""
    model = DigitsGAN()
    model.load_state_dict(state)
    model.eval()
    samples = DigitsAndNoise("test", draws=4, fixed=1)
    images, noise = zip(*(samples[index] for index in range(len(samples))), strict=True)
    meter = Frechet()
    with torch.no_grad():
        meter.update(model.generator(torch.stack(noise).flatten(0, 1)), torch.stack(images))
    return float(meter.compute()["distance"])


def raw_and_averaged(folder: Path, update: int) -> tuple[float, float]:
    """The distances of both kinds of weights at a checkpoint of ``folder/run``."""
    (path, *_) = sorted((folder / "run/checkpoints").glob(f"update_{update:09d}-*"))
    saved = store.verified(path)
    averages = store.load(saved, "state.pt")["averages"]["average"]
    return distance(store.load(saved, "model.pt")), distance(averages)


SHORT = 100
EARLY, LATE = (20, 40), (260, 280, 300)
"""Updates. Over these the averaged weights' distances add up to 1.05 to 1.21 times the raw ones'
early, and to 0.69 to 0.79 times late, with seeds 0 to 4."""


def trained(folder: Path, updates: int) -> tuple[Path, dict[str, Any]]:
    """The folder and final figures of so many updates at constant rates, with an average of
    shorter memory: it remembers the last 1 / (1 - 0.95) = 20 updates."""
    saves = ["hooks.checkpoint.every_updates=20", "hooks.checkpoint.keep_every_updates=20"]
    words = [f"phases.updates={updates}", f"phases.test_every_updates={updates}"]
    average = ["schedule=constant", "hooks.average.decay=0.95"]
    return folder, rig.final(folder, *WORDS, *words, *average, *saves)


def added(folder: Path, updates: tuple[int, ...]) -> tuple[float, float]:
    """The distances of raw and of averaged weights, added over checkpoints."""
    figures = [raw_and_averaged(folder, update) for update in updates]
    return sum(raw for raw, _ in figures), sum(averaged for _, averaged in figures)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("gan"), SHORT)


def test_it_learns(short: tuple[Path, dict[str, Any]]) -> None:
    _, final = short
    assert final["test/frechet/distance"] < NOISE_ITSELF < UNTRAINED


def test_averaged_weights_lose_early(short: tuple[Path, dict[str, Any]]) -> None:
    """Early the average is still near the start."""
    raw, averaged = added(short[0], EARLY)
    assert raw < averaged


@pytest.mark.slow
def test_averaged_weights_beat_raw_ones_late(tmp_path: Path) -> None:
    """Late the average evens out what the two players do to each other."""
    folder, final = trained(tmp_path, LATE[-1])
    raw, averaged = added(folder, LATE)
    assert averaged < raw
    assert final["test/frechet/distance"] <= LEARNED < UNTRAINED / 4
    # What was tested, and is reported, is the average.
    (_, last) = raw_and_averaged(folder, LATE[-1])
    assert final["test/frechet/distance"] == pytest.approx(last, rel=1e-6)


def test_samples_are_drawn_at_each_test(short: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = short
    files = sorted((folder / "run/images/test/samples").iterdir())
    assert [path.name for path in files] == ["update_000000000.png", f"update_{SHORT:09d}.png"]
    # 12 by 6 images of 8 pixels, four times as large, with a pixel between them and around.
    assert all(Image.open(path).size == (12 * 33 + 1, 6 * 33 + 1) for path in files)


def test_it_resumes_exactly(tmp_path: Path) -> None:
    words = ["phases.updates=8", "phases.test_every_updates=4", "data.train.batch_size=16",
             "data.test.limit=60", "run.log_every=1",
             "hooks.checkpoint.every_updates=3"]  # fmt: skip
    rig.resumes_exactly(tmp_path, *WORDS, *words, at=5)
    one, other = (tmp_path / name / "run/images/test/samples" for name in ("whole", "cut"))
    assert [path.name for path in sorted(one.iterdir())] == [
        f"update_{k:09d}.png" for k in (0, 4, 8)
    ]
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {
        p.name: p.read_bytes() for p in other.iterdir()
    }


def test_on_two_processes(tmp_path: Path) -> None:
    words = ["phases.updates=20", "phases.test_every_updates=20", "hooks.average=null"]
    final = rig.two_processes(tmp_path, *WORDS, *words)
    at_start = next(row for row in equal.rows(tmp_path / "run") if row["phase"] == "test")
    # Nothing learnt yet: the same weights, noise and images as one process has, all of them.
    assert at_start["update"] == 0
    assert at_start["test/frechet/distance"] == pytest.approx(UNTRAINED, abs=0.1)
    # One process comes to 176 to 245 in as many, of the short form's seeds 0 to 4.
    assert final["test/frechet/distance"] < 270


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gate(tmp_path: Path, seed: int) -> None:
    saves = ["hooks.checkpoint.every_updates=57", "hooks.checkpoint.keep_every_updates=57"]
    final = rig.final(tmp_path, *WORDS, f"seed={seed}", *saves)
    # Late, and before the rates are so low that raw weights hardly move any more.
    late = [raw_and_averaged(tmp_path, update) for update in (456, 513)]
    assert sum(averaged for _, averaged in late) < sum(raw for raw, _ in late)
    assert final["test/frechet/distance"] <= 12
    assert final["test/frechet/rarest_digit"] >= 0.02


# --- parts ---


class Features(torch.nn.Module):
    """The judge as torchmetrics asks for it."""

    num_features = 48

    def __init__(self) -> None:
        super().__init__()
        self.judge = Judge()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.judge(images)[0]


def test_the_distance_is_that_of_torchmetrics() -> None:
    torch.manual_seed(0)
    real, made = Digits("test").fetch(torch.arange(100))[0], torch.rand(200, 1, 8, 8)
    theirs = FrechetInceptionDistance(Features(), normalize=True)
    theirs.update(real, real=True)
    theirs.update(made, real=False)
    ours = Frechet()
    for part in range(2):  # and pieces add up
        ours.update(made[100 * part : 100 * part + 100], real[50 * part : 50 * part + 50])
    assert float(ours.compute()["distance"]) == pytest.approx(float(theirs.compute()), rel=1e-4)


def test_real_against_itself_is_zero_and_has_every_digit() -> None:
    real = Digits("test").fetch(torch.arange(359))[0]
    meter = Frechet()
    meter.update(real, real)
    values = meter.compute()
    assert float(values["distance"]) == pytest.approx(0, abs=1e-6)
    assert float(values["rarest_digit"]) >= 0.09  # a tenth of 359 images, give or take two
    meter.reset()
    assert all(int(tensor.count_nonzero()) == 0 for tensor in meter.summed())


def test_of_fewer_than_two_images_there_is_no_distance() -> None:
    real = Digits("test").fetch(torch.arange(2))[0]
    meter = Frechet()
    meter.update(real, real[:1])
    assert meter.compute()["distance"].isnan()
    meter.update(real, real[1:])
    assert meter.compute()["distance"].isfinite()


def test_real_against_real() -> None:
    """README.md: training images against test images."""
    meter = Frechet()
    meter.update(
        *(Digits(s).fetch(torch.arange(n))[0] for s, n in (("train", 1438), ("test", 359)))
    )
    assert float(meter.compute()["distance"]) == pytest.approx(1.03, abs=0.01)


def test_the_judge_reads_digits_and_learns_nothing() -> None:
    images, labels = Digits("test").fetch(torch.arange(359))
    judge = Judge()
    features, digits = judge(images)
    assert features.shape == (359, 48) and features.dtype == torch.float64
    assert float((digits == labels).double().mean()) >= 0.98
    assert not any(p.requires_grad for p in judge.parameters()) and not judge.training


def test_noise_is_fixed_or_drawn() -> None:
    fixed = DigitsAndNoise("test", draws=4, fixed=1)
    assert fixed[5][1].shape == (4, NOISE) and torch.equal(fixed[5][1], fixed[5][1])
    assert not torch.equal(fixed[5][1], fixed[6][1])
    assert torch.equal(fixed[5][1], DigitsAndNoise("test", draws=4, fixed=1)[5][1])
    drawn = DigitsAndNoise("train")
    assert not torch.equal(drawn[5][1], drawn[5][1])
    torch.manual_seed(3)
    first = drawn[5][1]
    torch.manual_seed(3)
    assert torch.equal(first, drawn[5][1])


def test_losses_are_the_hinge() -> None:
    class Fake(torch.nn.Module):
        """Images are noise's first number; they look as real as they are bright."""

        def generator(self, noise: torch.Tensor) -> torch.Tensor:
            return noise[:, :1]

        def discriminator(self, images: torch.Tensor) -> torch.Tensor:
            return images

    class Two:
        input = torch.tensor([[0.5], [3.0]])
        target = torch.tensor([[[-2.0], [9.0]], [[0.5], [1.0]]])

    losses = HingeLosses()
    parts = losses.discriminator(Fake(), Two())  # type: ignore[arg-type]
    assert parts["real"].item() == (0.5 + 0) / 2
    assert parts["made"].item() == (0 + 1.5) / 2
    assert losses.generator(Fake(), Two()).item() == -(9 + 1) / 2  # type: ignore[arg-type]


def test_spread_is_zero_for_one_image_again_and_again() -> None:
    same = torch.rand(1, 2, 4, 4).expand(5, -1, -1, -1)
    assert Spread()(same)[:, 2].unique().item() == pytest.approx(1e-4)  # the root of 1e-8
    two = torch.stack([torch.zeros(2, 4, 4), torch.ones(2, 4, 4)])
    assert Spread()(two)[:, 2].unique().item() == pytest.approx(0.5, abs=1e-6)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="draws"):
        DigitsAndNoise("test", draws=0)
    with pytest.raises(ValueError, match="width"):
        DigitsGAN(width=1)
    with pytest.raises(ValueError, match="rows"):
        Samples(rows=0)
