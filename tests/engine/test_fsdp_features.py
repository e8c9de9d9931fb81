"""Backend fsdp with what changes parameters, gradients, or who goes through the model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phaseloop import Hook, LossScale, ModelOptions, Precision, Trainer, Weights
from phaseloop.engine.backends import Fsdp
from phaseloop.engine.checkpoint.store import Store
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.model_options import Compile
from phaseloop.hooks.average import Average
from phaseloop.hooks.freeze import Freeze
from phaseloop.hooks.gradient_norm import GradientNorm
from phaseloop.hooks.precise_bn import PreciseBN
from phaseloop.tools.export import export
from tests.engine.test_fsdp import TOLERANCE, alone, assert_close, together
from tests.rigs import equal, process, r1, ranks, sharded

MODEL_OPTIONS = ModelOptions(checkpoint=["blocks.*"], compile=Compile(backend="eager"))


@pytest.mark.parametrize(
    "options",
    [
        {"hooks": {"freeze": Freeze(["blocks.0", "first.*"], first_updates=3)}},
        {"freeze": ["blocks.*", "scale"], "optimizer": "adamw"},
        {"model_options": MODEL_OPTIONS, "micro": 1},
        {"hooks": {"gradient_norm": GradientNorm(per_parameter=True)}},
    ],
    ids=["frozen_at_first", "frozen_for_good", "recomputed_and_compiled", "norms"],
)
def test_as_with_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_close(tmp_path, alone(tmp_path, **options), together(tmp_path, **options))


class GoBack(Hook):
    """Asks for the run's newest checkpoint once, in the middle of an update."""

    saves = True

    def __init__(self) -> None:
        self.done = False

    def on_gradients(self, task: Any) -> None:
        if not self.done and task.progress.updates == 5:
            self.done = True
            task.roll_back("the test asked for it", 1)


def test_a_roll_back_takes_a_checkpoint_back(tmp_path: Path) -> None:
    options = {"hooks": {"back": GoBack()}, "save": {"every_updates": 2}, "optimizer": "adamw"}
    assert_close(tmp_path, alone(tmp_path, **options), together(tmp_path, **options))


def test_batch_norms_have_the_statistics_that_they_have_with_ddp(tmp_path: Path) -> None:
    """Those of each share, which more processes cut smaller; buffers are the primary's."""
    options: dict[str, Any] = {
        "net": {"batch_norm": True}, "test": 7, "hooks": {"precise_bn": PreciseBN(batches=3)},
    }  # fmt: skip
    ddp = ranks.results(sharded.train, tmp_path / "alone", backend="ddp", **options)
    assert_close(tmp_path, ddp[0], together(tmp_path, **options))


class Told(sharded.Net):
    """Rank 1 is told to stop in the middle of the third batch that norms are measured over."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.measured = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.norm.training and not self.training:
            self.measured += 1
            if self.measured == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)


def told(folder: Path) -> tuple[Any, int, int]:
    """The signal, the updates that were made and the batches that were measured."""
    task = sharded.task(folder, backend="fsdp", model=Told, test=7, options={"timeout": 20.0})
    hooks = r1.make_hooks(precise_bn=PreciseBN(batches=10**6))
    outcome = Trainer(task, hooks).train()
    return outcome.signal, outcome.updates, task.bare_model.measured


def test_a_signal_to_one_process_ends_the_measuring_on_all(tmp_path: Path) -> None:
    # A fourth batch is not begun, on the other process either.
    assert ranks.results(told, tmp_path) == [(signal.SIGTERM, 4, 3)] * 2
    assert len(Store(tmp_path / "checkpoints").names()) == 1
    assert equal.state_of(equal.newest(tmp_path))["progress"]["updates"] == 4


# --- two networks that take turns ---


class Part(nn.Module):
    """Two layers that are one unit: what stays whole after forward, if nothing lets go of it."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 5), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Pair(nn.Module):
    """A generator and a discriminator: no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Part(7, 3)
        self.discriminator = Part(3, 1)


class Losses(nn.Module):
    """Least squares; with a parameter of its own, which is whole everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.ones(()))

    def generator(self, model: Pair, batch: Any) -> Tensor:
        return (model.discriminator(model.generator(batch.input)) - 1).square().mean()

    def discriminator(self, model: Pair, batch: Any) -> Tensor:
        made = model.discriminator(model.generator(batch.input).detach())
        return (
            model.discriminator(batch.target) - self.margin
        ).square().mean() + made.square().mean()


def pair_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    assert isinstance(model, Pair)
    return {
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.1),
        "discriminator": torch.optim.SGD(model.discriminator.parameters(), lr=0.1),
    }


def test_networks_that_take_turns_are_units_of_their_own(tmp_path: Path) -> None:
    options = {"model": Pair, "make": pair_optimizers, "criterion": Losses, "test": 5,
               "train_step": "alternating", "every": {"generator": 2}}  # fmt: skip
    assert_close(tmp_path, alone(tmp_path, **options), together(tmp_path, **options))


# --- precision ---


def test_half_precision(tmp_path: Path) -> None:
    """bfloat16 has 8 bits: sums of 6 samples that are rounded in another order differ by 2**-8."""
    options: dict[str, Any] = {"precision": "bfloat16", "epochs": 1}
    alone(tmp_path, **options)
    together(tmp_path, **options)
    a, b = sharded.saved(tmp_path / "alone"), sharded.saved(tmp_path / "together")
    assert b["model"]["first.weight"].dtype == torch.float32
    assert sharded.furthest(a["model"], b["model"]) < 2**-8


def test_an_overflow_on_one_process_is_one_for_all(tmp_path: Path) -> None:
    """At first 2**24, which no gradient in float16 survives (65504 is its largest number), and
    which is halved at each overflow. A mean over half as many samples has gradients of twice the
    size at each of them, so that two processes may halve it once more than one."""
    options: dict[str, Any] = {
        "precision": Precision("float16", LossScale(initial=2.0**24)), "epochs": 4,
    }  # fmt: skip
    alone(tmp_path, **options)
    several = together(tmp_path, **options)
    skipped = [equal.rows(tmp_path / name) for name in ("alone", "together")]
    counts = [sum(row.get("event") == "skip" for row in rows) for rows in skipped]
    assert counts[0] > 2 and counts[1] - counts[0] in (0, 1)
    # Updates that counted: all windows but the skipped ones, on each.
    assert [one["updates"] for one in several] == [4 * 4 - counts[1]] * 2


# --- not finite ---


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_what_one_process_finds_not_finite_all_skip(tmp_path: Path, backend: str) -> None:
    options = {"poison": 17, "policy": "skip", "micro": 1}
    alone(tmp_path, **options)
    ranks.results(sharded.train, tmp_path / "together", backend=backend, **options)
    a, b = sharded.saved(tmp_path / "alone"), sharded.saved(tmp_path / "together")
    assert sharded.furthest(a, b) < TOLERANCE
    one, several = (
        [row for row in equal.rows(tmp_path / name) if row.get("event") == "skip"]
        for name in ("alone", "together")
    )
    # Two epochs; the sample is named, whichever process had it.
    assert [row["update"] for row in one] == [row["update"] for row in several]
    assert len(one) == 2 and all("samples 17)" in row["reason"] for row in (*one, *several))


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_what_one_process_finds_not_finite_ends_all_with_the_same_words(
    tmp_path: Path, backend: str
) -> None:
    ended = ranks.run(sharded.train, tmp_path / "run", backend=backend, poison=17, micro=1)
    assert [one.code for one in ended] == [1, 1]
    said = [one.output.partition("NonFiniteError: ")[2].splitlines()[0] for one in ended]
    assert said[0] == said[1] and "samples 17" in said[0]


# --- weights ---


def test_initial_weights_are_cut_as_they_are_loaded(tmp_path: Path) -> None:
    process.result(sharded.train, tmp_path / "before", epochs=1, seed=3)
    options = {"weights": Weights(str(tmp_path / "before"))}
    assert_close(tmp_path, alone(tmp_path, **options), together(tmp_path, **options))


def test_an_export_has_whole_tensors(tmp_path: Path) -> None:
    options = {"hooks": {"average": Average(decay=0.5)}, "epochs": 1}
    alone(tmp_path, **options)
    together(tmp_path, **options)
    raw, state = sharded.saved(tmp_path / "together")["model"], {}
    for kind in ("raw", "average"):
        for name in ("alone", "together"):
            out = tmp_path / f"{name}-{kind}.pt"
            export(tmp_path / name, out, averages=kind)
            state[name] = torch.load(out, weights_only=True)
        assert sharded.furthest(state["alone"], state["together"]) < TOLERANCE
        assert (not list(equal.differ("", dict(raw), state["together"]))) is (kind == "raw")


# --- what is refused ---


def early(folder: Path, **options: Any) -> None:
    """A task with an optimizer that was made too early."""
    task = sharded.task(folder, **options)
    task.given_optimizer = torch.optim.SGD(task.bare_model.parameters(), lr=0.1)
    task.build()


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


class CallsAPart:
    """A step that calls what is no unit."""

    def __call__(self, task: Any) -> None:
        task.bare_model.last(task.next_batch().input)


def test_a_torch_that_cannot_reduce_unused_ones_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of 2.9: the option is newer."""
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ConfigError, match=r"backend.reduce_unused: torch 2\.9\.1\+cpu cannot"):
        Fsdp(reduce_unused=True).prepare_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (early, {}, "optimizer: it was made for the whole parameters"),
        (sharded.train, {"make": adafactor}, "optimizer: Adafactor cannot work on parts"),
        (sharded.train, {"train_step": CallsAPart()}, "name the part in backend.shard"),
    ],
    ids=["instance", "adafactor", "part"],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, function: Any, options: dict[str, Any], words: str
) -> None:
    ended = ranks.run(function, tmp_path / "run", backend="fsdp", **options)
    assert all(one.code for one in ended)
    assert words in ended[0].output
