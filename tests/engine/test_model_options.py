"""Model options: compiled, channels last, checkpointed; the same training, the same names."""

from __future__ import annotations

import copy
import io
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from phaseloop import (
    Compile,
    ConfigError,
    Data,
    ModelOptions,
    PhaseloopError,
    Task,
    TensorData,
    Trainer,
)
from phaseloop.engine import recompute
from phaseloop.engine.model_options import channels_last, compile_in_place, lay_out, release
from phaseloop.hooks.console import Console
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, differ, probe_of
from tests.rigs.r1 import At, ToldError

EAGER = Compile(backend="eager")


class Block(nn.Module):
    """Everything that a second forward could get wrong: dropout, running statistics, a buffer that
    moves and decides, and draws of Python and NumPy."""

    moves: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("moves", torch.ones(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.training:
            self.moves.mul_(1.25)
        drawn = random.random() + np.random.rand()
        out: Tensor = self.dropout(self.norm(self.linear(x))).relu()
        return x + scale * drawn * self.moves * out


def blocks(count: int = 2) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(count)), nn.Linear(4, 2))


class Losses(r1.Counter):
    """The loss of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def on_loss_and_meter(self, task: Task) -> None:
        assert task.loss is not None
        self.losses.append(task.loss.detach().clone())


def trained(model: nn.Module, **options: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """The state after two epochs with tests, and all losses."""
    losses = Losses()
    task = r1.make_task(None, model=model, epochs=2, test=True, **options)
    Trainer(task, {"losses": losses}).train()
    return dict(model.state_dict()), losses.losses


def same(a: Any, b: Any) -> list[str]:
    return list(differ("", a, b))


# --- activation checkpointing ---


@pytest.mark.parametrize("patterns", [["0"], ["0", "1"], ["*"], ["?.linear", "1"]], ids=str)
def test_checkpointing_changes_no_bit(patterns: list[str]) -> None:
    """Weights, running statistics, the moving buffer, and every loss; micro-batches too."""
    data = {"micro_batch_size": 3}
    plain = trained(blocks(), data=data)
    saved = trained(blocks(), data=data, model_options=ModelOptions(checkpoint=patterns))
    assert same(plain, saved) == []


def kept(model: nn.Module, x: Tensor) -> int:
    """Elements that a forward keeps for backward, each storage once, but for parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters:
            found[place] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
    return sum(found.values())


def test_checkpointing_keeps_only_the_input_of_each_block() -> None:
    # A linear layer keeps its input, a GELU its input: two times 5 x 4 for each of three blocks.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))
    x = torch.randn(5, 4)
    assert kept(model, x) == 3 * 2 * 20
    lay_out(model, ModelOptions(checkpoint=["*"]))
    assert kept(model, x) == 3 * 20  # the input of each block


class Masked(nn.Module):
    """A mask that the forward only reads, beside statistics and a buffer that it replaces."""

    mask: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.own = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4))
        self.replaced = nn.Module()
        self.replaced.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.replaced.mean
        self.replaced.mean = 0.5 * mean + x.detach().mean()
        return self.own(self.linear(x * self.mask)) * (1 + mean)


def test_only_buffers_that_a_forward_may_have_changed_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    real = recompute._Before
    monkeypatch.setattr(recompute, "_Before", lambda m: made.append(real(m)) or made[-1])
    torch.manual_seed(0)
    model = nn.Sequential(Masked())
    plain = copy.deepcopy(model)
    lay_out(model, ModelOptions(checkpoint=["0"]))
    for step in range(2):
        x = torch.randn(5, 4)
        for each in (model, plain):
            each(x).square().sum().backward()
        # Mean, variance and count of the norm, and the mean; not the mask.
        assert sorted(b.numel() for b in made[step]._copies.values()) == [1, 1, 4, 4]
    gradients = [[p.grad for p in each.parameters()] for each in (model, plain)]
    assert same(*gradients) == []
    assert same(model.state_dict(), plain.state_dict()) == []


def test_a_buffer_changed_before_the_forward_is_computed_again_is_an_error() -> None:
    model = nn.Sequential(Masked())
    lay_out(model, ModelOptions(checkpoint=["0"]))
    loss = model(torch.randn(5, 4)).square().sum()
    model[0].mask.zero_()
    with pytest.raises(PhaseloopError, match="'mask' of a Masked was changed"):
        loss.backward()


def test_in_test_phases_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    real = recompute.checkpoint

    def counted(forward: Any, *args: Any, **kwargs: Any) -> Any:
        modes.append(forward.__self__.training)
        return real(forward, *args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", counted)
    trained(blocks(), model_options=ModelOptions(checkpoint=["0"]))
    assert modes == [True] * 2 * r1.UPDATES


def test_names_copies_and_pickles_are_those_of_the_bare_model() -> None:
    model = blocks()
    names = list(model.state_dict())
    lay_out(model, ModelOptions(checkpoint=["?"]))
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert twin[0].forward.__self__ is twin[0]  # and not the module that it is a copy of
    stream = io.BytesIO()
    torch.save(blocks(), stream)
    stream.seek(0)
    assert list(torch.load(stream, weights_only=False).state_dict()) == names


def test_a_pickled_model_has_the_forward_of_its_class() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    lay_out(model, ModelOptions(checkpoint=["0"]))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    back = torch.load(stream, weights_only=False)
    x = torch.ones(1, 2)
    assert torch.equal(back(x), model(x))
    assert back[0].forward.__self__ is back[0]


def test_options_by_keyword_reach_a_checkpointed_forward() -> None:
    model = nn.ModuleDict({"a": Block()})
    lay_out(model, ModelOptions(checkpoint=["a"]))
    x = torch.randn(3, 4, requires_grad=True)
    assert torch.equal(model["a"](x, scale=0.0), x)


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            raise ToldError
        return super().forward(x)


def test_an_error_inside_a_checkpointed_module_is_raised_as_it_is() -> None:
    model = nn.Sequential(Failing(4, 2))
    options = ModelOptions(checkpoint=["0"])
    with pytest.raises(ToldError):
        trained(model, data={"micro_batch_size": 3}, model_options=options)
    assert "forward" not in vars(model[0])


def test_after_a_run_the_model_is_called_as_before() -> None:
    model = r1.network()
    options = ModelOptions(checkpoint=["0"], compile=EAGER)
    trained(model, model_options=options)
    assert "forward" not in vars(model[0])
    assert model._compiled_call_impl is None


# --- compilation ---


class BodyAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = r1.network(1)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).tanh())
        return out


def test_compiled_and_checkpointed_together_change_no_bit_and_are_compiled() -> None:
    """With a backend that runs the graph as it is: what dropout draws and the sums are the same."""
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.manual_seed(0)
    model = BodyAndHead()
    twin = copy.deepcopy(model)
    options = ModelOptions(compile=Compile(backend=backend), checkpoint=["body"])
    plain, compiled = trained(model), trained(twin, model_options=options)
    assert same(plain, compiled) == []
    assert any("dropout" in name for name in seen)  # inside the checkpointed module
    assert any("tanh" in name for name in seen)  # and outside


@contextmanager
def released(model: nn.Module, options: ModelOptions) -> Iterator[None]:
    compile_in_place(model, options)
    try:
        yield
    finally:
        release(model, options)


def test_the_options_of_compile_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options))
    how = Compile(backend="inductor", dynamic=True, fullgraph=True, options={"max_autotune": True})
    with released(nn.Linear(1, 1), ModelOptions(compile=how)):
        pass
    assert given == {
        "backend": "inductor", "mode": None, "dynamic": True, "fullgraph": True,
        "options": {"max_autotune": True},
    }  # fmt: skip


# --- channels last ---


class Images(r1.Samples):
    """The points of R1 as images [1, 2, 2], beside a mask of another type."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "input": sample["input"].reshape(1, 2, 2).expand(2, 2, 2).clone()}


class ImageNet(nn.Sequential):
    """Images [B, 2, 2, 2] to logits; notes how its input lay in memory."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1),
            nn.Flatten(), nn.Linear(4 * 9, 2),
        )  # fmt: skip
        self.layouts: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.layouts.add(x.is_contiguous(memory_format=torch.channels_last))
        out: Tensor = super().forward(x)
        return out


def train_images(folder: Path | None, at: At | None = None, **options: Any) -> ImageNet:
    torch.manual_seed(0)
    model = ImageNet()
    task = r1.make_task(folder, model=model, train=Data(Images(), r1.BATCH), **options)
    hooks = r1.make_hooks(folder and probe_of(folder), {"every_updates": 7})
    Trainer(task, {**hooks, **({"at": at} if at else {})}).train()
    return model


def test_channels_last_for_the_model_and_its_input() -> None:
    model = train_images(None, model_options=ModelOptions(channels_last=True))
    assert model.layouts == {True}
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert train_images(None).layouts == {False}


def test_only_floating_point_tensors_of_four_dimensions_are_laid_out() -> None:
    data = {"a": torch.rand(2, 3, 4, 5), "b": [torch.ones(2, 3, 4, 5).int(), torch.rand(3, 4, 5)]}
    out = channels_last(data)
    assert out["a"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out["a"], data["a"])
    assert out["b"][0] is data["b"][0] and out["b"][1] is data["b"][1]


@pytest.mark.parametrize(
    "options",
    [
        ModelOptions(channels_last=True),
        ModelOptions(checkpoint=["0", "3"]),
        ModelOptions(compile=EAGER, channels_last=True, checkpoint=["0"]),
    ],
    ids=lambda options: ", ".join(options.describe()),
)
def test_a_killed_run_goes_on_exactly(tmp_path: Path, options: ModelOptions) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    process.result(_train_images, reference, model_options=options)
    ended = process.run(_train_images, folder, At("on_step", 17), model_options=options)
    assert ended.code == -signal.SIGKILL, ended.output
    process.result(_train_images, folder, model_options=options)
    assert_eq(reference, folder)


def _train_images(*args: Any, **options: Any) -> None:
    train_images(*args, **options)


def test_checkpointing_may_be_switched_on_in_mid_run(tmp_path: Path) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    train_images(reference)
    train_images(folder, At("on_step", 17, "stop"), model_options=ModelOptions(checkpoint=["0"]))
    train_images(folder)
    assert_eq(reference, folder)


def test_another_layout_is_another_run(tmp_path: Path) -> None:
    train_images(tmp_path / "run", At("on_step", 3, "stop"))
    with pytest.raises(ConfigError, match=r"model\.channels_last: absent -> True"):
        train_images(tmp_path / "run", model_options=ModelOptions(channels_last=True))


# --- fused optimizers ---


@pytest.mark.parametrize("option", ["fused", "foreach"])
def test_fused_and_foreach_optimizers_go_on_exactly(tmp_path: Path, option: str) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    process.result(_train_with, reference, option)
    assert process.run(_train_with, folder, option, At("on_step", 17)).code == -signal.SIGKILL
    process.result(_train_with, folder, option)
    assert_eq(reference, folder)


def _train_with(folder: Path, option: str, at: At | None = None) -> None:
    model = r1.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **{option: True})
    hooks = {} if at is None else {"at": at}
    r1.train(folder, probe_of(folder), model=model, optimizer=optimizer,
             save={"every_updates": 7}, hooks=hooks)  # fmt: skip
    assert optimizer.param_groups[0][option] is True


# --- what is refused, and what is said ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ModelOptions(checkpoint=["block*"]), "'block*' matches no module with a forward"),
        (ModelOptions(checkpoint=["0.linaer"]), "Did you mean '0.linear'?"),
        (ModelOptions(checkpoint="0"), "'0' is not a list of patterns"),  # type: ignore[arg-type]
        (ModelOptions(compile="eager"), "model.compile: 'eager' is not"),  # type: ignore[arg-type]
        (ModelOptions(channels_last=1), "model.channels_last: 1 is not"),  # type: ignore[arg-type]
        (ModelOptions(compile=Compile("eagr")), "model.compile.backend: 'eagr' is no backend. Did"),
        (ModelOptions(compile=Compile("eager", mode="default")), "only inductor has modes"),
        (ModelOptions(compile=Compile(mode="fast")), "model.compile.mode: 'fast' is not one of"),
        (
            ModelOptions(compile=Compile(mode="default", options={})),
            "model.compile.mode: give mode or options, not both",
        ),
        (
            ModelOptions(compile=Compile("eager", fullgraph=True), checkpoint=["0"]),
            "model.compile.fullgraph",
        ),
    ],
    ids=str,
)
def test_refused_before_the_run(options: ModelOptions, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        r1.make_task(None, model=blocks(), model_options=options)
    assert message in str(caught.value)


def test_a_list_of_modules_cannot_be_checkpointed_but_its_modules_can() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

    with pytest.raises(ConfigError, match=r"'blocks' matches .* Did you mean 'blocks\.\d'"):
        ModelOptions(checkpoint=["blocks"]).check_model(Holder())
    model = Holder()
    lay_out(model, ModelOptions(checkpoint=["blocks*"]))
    assert all("forward" in vars(block) for block in model.blocks)
    assert "forward" not in vars(model.blocks[0].linear)  # the outermost alone


def test_other_names_and_double_work_are_refused() -> None:
    wrapped: Any = torch.compile(blocks(), backend="eager")
    with pytest.raises(ConfigError, match=r"other names .* model\.compile"):
        r1.make_task(None, model=wrapped, optimizer=lambda model: r1.optimizer("sgd", model))
    model = blocks()
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match="compiled already"):
        r1.make_task(None, model=model, model_options=ModelOptions(compile=EAGER))
    model[0].forward = model[0].forward  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="0 has a forward of its own"):
        r1.make_task(None, model=model, model_options=ModelOptions(checkpoint=["0"]))


def test_the_console_says_what_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    options = ModelOptions(compile=EAGER, channels_last=True, checkpoint=["0"])
    task = r1.make_task(None, epochs=0, model_options=options)
    Trainer(task, {"console": Console()}).train()
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("model"))
    # 58 numbers of four bytes.
    said = "58 parameters (232 B), compiled by eager, channels last, activation checkpointing of 0"
    assert said in line


def test_a_step_that_takes_other_inputs_is_not_disturbed() -> None:
    """Input that holds no tensor, or none of four dimensions, stays what it is."""
    batch: list[Any] = []

    def step(task: Task) -> None:
        batch.append(task.next_batch().input)
        raise ToldError

    task = r1.make_task(
        None, train_step=step, train=Data(TensorData(torch.zeros(4, 4)), 2),
        model_options=ModelOptions(channels_last=True),
    )  # fmt: skip
    with pytest.raises(ToldError):
        Trainer(task, {}).train()
    assert batch[0].shape == (2, 4)
