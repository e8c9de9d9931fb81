"""OPT: several optimizers, closures, truncated backpropagation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Batch,
    ConfigError,
    Data,
    PhaseloopError,
    Phases,
    Schedule,
    Stage,
    Task,
    TensorData,
    Trainer,
)
from phaseloop.engine.schedules import cosine
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.train_steps import Alternating, TruncatedBackpropagation
from tests.rigs.probes import watch
from tests.rigs.r0 import numbers, pair, r0, train

BATCHES, SIZE = 10, 4


class GAN(nn.Module):
    """A generator of points in the plane and a discriminator of them; the last layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.generator[2].bias.requires_grad_(False)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=0.01),
            "generator": torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
        }


class Losses:
    """The non-saturating losses of a GAN; noise is part of the sample, so that it can be cut."""

    def discriminator(self, model: GAN, batch: Batch) -> Tensor:
        real, noise = batch.input, batch.target
        fake = model.generator(noise).detach()
        return softplus(-model.discriminator(real)) + softplus(model.discriminator(fake))

    def generator(self, model: GAN, batch: Batch) -> Tensor:
        return softplus(-model.discriminator(model.generator(batch.target)))


def softplus(x: Tensor) -> Tensor:
    return nn.functional.softplus(x).mean()


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(BATCHES * SIZE, 2, generator=generator) + 2
    return real, torch.randn(BATCHES * SIZE, 3, generator=generator)


def gan_task(**options: Any) -> Task:
    """A task of the GAN, ten batches of four in order."""
    model = options.pop("model", None) or GAN()
    data = options.pop("data", {})
    settings: dict[str, Any] = {
        "criterion": Losses(),
        "optimizer": model.optimizers(),
        "train": Data(TensorData(*points()), SIZE, shuffle=False, **data),
        "train_step": Alternating(),
        "phases": Phases(epochs=1),
    }
    return Task(model=model, **{**settings, **options})


def by_hand(every: Mapping[str, int], pieces: int = 1, batches: int = BATCHES) -> GAN:
    """The same, written as a loop."""
    model, losses = GAN(), Losses()
    optimizers = model.optimizers()
    real, noise = points()
    for k in range(batches):
        part = slice(k * SIZE, (k + 1) * SIZE)
        for name, optimizer in optimizers.items():
            if (k + 1) % every[name]:
                continue
            for x, z in zip(real[part].chunk(pieces), noise[part].chunk(pieces), strict=True):
                batch = Batch((x, z), torch.arange(len(x)), len(x))
                (getattr(losses, name)(model, batch) * (len(x) / SIZE)).backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_opt_a_two_optimizers_are_the_hand_written_loop(micro_batch_size: int | None) -> None:
    task = gan_task(data={"micro_batch_size": micro_batch_size})
    flags = watch("on_step", lambda t: [p.requires_grad for p in t.bare_model.parameters()])
    train(task, flags=flags)

    expected = by_hand({"discriminator": 1, "generator": 1}, pieces=2 if micro_batch_size else 1)
    assert_same(task.bare_model, expected)
    assert task.progress.steps == BATCHES * (2 if micro_batch_size else 1)  # micro-batches
    assert flags.seen == [[p.requires_grad for p in GAN().parameters()]] * BATCHES
    assert torch.equal(task.bare_model.generator[2].bias, GAN().generator[2].bias)


def test_opt_a_gradients_are_made_for_one_optimizer_alone() -> None:
    """While the generator's loss is computed, the discriminator needs no gradient."""
    seen: list[set[str]] = []

    def look(task: Task) -> None:
        seen.append({n.split(".")[0] for n, p in task.bare_model.named_parameters()
                     if p.requires_grad})  # fmt: skip

    train(gan_task(), look=watch("on_backward", look))
    assert seen == [{"discriminator"}, {"generator"}] * BATCHES


def test_opt_a_flags_are_put_back_after_an_error() -> None:
    class Failing(Losses):
        def generator(self, model: GAN, batch: Batch) -> Tensor:
            raise ValueError("planted")

    task = gan_task(criterion=Failing())
    with pytest.raises(ValueError, match="planted"):
        train(task)
    assert [p.requires_grad for p in task.bare_model.parameters()] == [
        p.requires_grad for p in GAN().parameters()
    ]


def test_opt_b_one_update_number_and_each_optimizer_its_own_count() -> None:
    task = gan_task(every={"generator": 2})
    assert train(task).updates == BATCHES
    assert task.progress.moved == {"discriminator": BATCHES, "generator": BATCHES // 2}
    assert_same(task.bare_model, by_hand({"discriminator": 1, "generator": 2}))


def test_opt_b_a_length_in_updates() -> None:
    task = gan_task(every={"generator": 2}, phases=Phases(updates=8))
    assert train(task).updates == 8
    assert task.progress.moved == {"discriminator": 8, "generator": 4}
    assert_same(task.bare_model, by_hand({"discriminator": 1, "generator": 2}, batches=8))


def test_opt_b_each_schedule_is_spread_over_its_optimizers_own_updates() -> None:
    task = gan_task(every={"generator": 2}, schedule=Schedule(cosine()))
    used: dict[str, list[float]] = {"discriminator": [], "generator": []}

    def look(t: Task) -> None:
        for name in t.stepping:
            used[name].append(t.optimizers[name].param_groups[0]["lr"])

    train(task, learning_rate=LearningRate(), look=watch("on_update", look))
    for name, base, moves in (("discriminator", 0.01, 10), ("generator", 0.1, 5)):
        wheres = torch.arange(moves, dtype=torch.float64) / moves
        expected = base * (1 + torch.cos(torch.pi * wheres)) / 2
        torch.testing.assert_close(torch.tensor(used[name], dtype=torch.float64), expected)


def test_opt_b_a_skip_is_one_optimizers_own() -> None:
    """The generator's is left out at batch 3: the update counts, the generator's does not."""

    def leave_out(task: Task) -> None:
        if task.stepping == ("generator",) and task.progress.updates == 2:
            task.skip_update("asked for by the test")

    events = watch("on_step", lambda t: list(t.recorder.events))
    task = gan_task()
    assert train(task, skip=watch("on_gradients", leave_out, order=50), events=events).updates == 10
    assert task.progress.moved == {"discriminator": 10, "generator": 9}
    assert [found for found in events.seen if found] == [
        [{"event": "skip", "update": 3, "reason": "asked for by the test",
          "optimizer": "generator"}]
    ]  # fmt: skip


def test_opt_b_frequencies_in_a_step_of_one_micro_batch() -> None:
    """A parameter's gradient of a batch at which its optimizer does not step is dropped."""

    task = pair([(x, x) for x in (1, 2, 4, 8)], every={"b": 2})
    train(task)
    assert task.bare_model.a.item() == -(1 + 2 + 4 + 8)
    assert task.bare_model.b.item() == -(2 + 8)


def test_opt_b_an_optimizer_without_gradients_has_not_moved() -> None:
    """The discriminator is frozen: it is passed over, its schedule stands, and it counts 0."""
    model = GAN()
    model.discriminator.requires_grad_(False)
    task = gan_task(model=model, schedule=Schedule(cosine()))
    assert train(task, learning_rate=LearningRate()).updates == BATCHES
    assert task.progress.moved == {"generator": BATCHES}
    assert task.optimizers["discriminator"].param_groups[0]["lr"] == 0.01


def test_opt_b_frequencies_count_from_a_stages_beginning() -> None:
    """Five updates in each of two stages, every second: two moves in each, and none left over."""
    stages = [Stage(name="a", updates=5), Stage(name="b", updates=5)]
    wheres: list[float] = []

    def look(task: Task) -> None:
        if task.stepping == ("generator",):
            wheres.append(task.optimizers["generator"].param_groups[0]["lr"])

    task = gan_task(every={"generator": 2}, phases=stages, schedule=Schedule(cosine()))
    train(task, learning_rate=LearningRate(), look=watch("on_update", look))
    assert task.progress.moved == {"discriminator": 10, "generator": 4}
    assert wheres == pytest.approx([0.1, 0.05] * 2)


def test_opt_b_a_skip_may_name_the_optimizers() -> None:
    """In one update of both, the first is left out."""

    task = pair([(1, 1), (math.nan, 1)])
    train(task, non_finite=NonFinite("skip"))
    assert task.progress.moved == {"a": 1, "b": 2}
    assert (task.bare_model.a.item(), task.bare_model.b.item()) == (-1, -2)


def two_passes(task: Task) -> None:
    """Adds two sums of weights into one update."""
    for _ in range(2):
        for batch in task.window():
            loss = task.forward(batch.input).mean()
            task.backward(loss, weight=2)
    task.update()


def all_at_once(task: Task) -> None:
    """Takes the micro-batches out of their loop."""
    for batch in list(task.window()):
        task.backward(task.forward(batch.input).mean())
    task.update()


def broken_off(task: Task) -> None:
    """Adds a pass over one micro-batch to one over all."""
    for batch in task.window():
        task.backward(task.forward(batch.input).mean())
        break
    for batch in task.window():
        task.backward(task.forward(batch.input).mean())
    task.update()


def too_late(task: Task) -> None:
    """Asks for a skip when the update is made."""
    task.skip_update("too late")


def nested(task: Task) -> None:
    with task.only("optimizer"), task.only("optimizer"):
        pass


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (two_passes, "follows one whose losses had weights"),
        (broken_off, "follows one that was broken off"),
        (all_at_once, "belongs inside the loop over window"),
        (too_late, "belongs in on_gradients"),
        (nested, "no other only"),
    ],
)
def test_opt_what_a_step_must_not_do_is_an_error(step: Any, message: str) -> None:
    step.takes = "window"
    with pytest.raises(PhaseloopError, match=message):
        train(r0([1, 2, 3, 4], 4, data={"micro_batch_size": 2}, train_step=step))


def test_opt_a_parameter_of_two_optimizers_is_refused() -> None:
    model = GAN()
    both = {"a": torch.optim.SGD(model.parameters(), 1.0),
            "b": torch.optim.SGD(model.generator.parameters(), 1.0)}  # fmt: skip
    with pytest.raises(ConfigError, match=r"optimizers\.b: a moves generator\.0\.weight already"):
        train(gan_task(model=model, optimizer=both))


def test_opt_the_step_of_a_later_stage_has_to_suit_lbfgs() -> None:
    stages = [Stage(name="a", epochs=1), Stage(name="b", epochs=1, train_step="standard")]
    with pytest.raises(ConfigError, match="LBFGS asks for the loss several times"):
        train(lbfgs_task(Distance(), phases=stages))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": {"generators": 2}}, "Did you mean 'generator'"),
        ({"every": {"generator": 0}}, "optimizers.generator.every: 0 is less than 1"),
        ({"every": {"generator": 2, "discriminator": 3}}, "one must have every=1"),
        ({"train_step": Alternating(["critic"])}, "no optimizer is called 'critic'"),
        ({"criterion": object()}, "object has no method 'discriminator'"),
    ],
)
def test_opt_what_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(gan_task(**options))


# --- closures ---


class Distance(nn.Module):
    """w - 2, from w = 5."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - 2 + 0 * x


def square(output: Tensor, target: Any) -> Tensor:
    return (output**2).mean()


def lbfgs_task(model: nn.Module, **options: Any) -> Task:
    data = options.pop("data", {})
    settings: dict[str, Any] = {
        "criterion": square,
        "optimizer": torch.optim.LBFGS(model.parameters(), lr=1, max_iter=4),
        "train": Data(numbers([0, 0]), 2, **data),
        "train_step": "closure",
        "phases": Phases(epochs=1),
    }
    return Task(model=model, **{**settings, **options})


def test_opt_c_lbfgs() -> None:
    """(w - 2)²: the first step goes by min(1, 1/|g|) * lr = 1/6 along g = 6, to w = 4; the second
    has the curvature and lands on 2; the third sees a gradient of 0 and ends."""
    model = Distance()
    rows = watch("on_step", lambda t: float(t.loss))
    calls = watch("on_backward", lambda t: None)
    outcome = train(lbfgs_task(model), rows=rows, calls=calls)
    assert outcome.updates == 1
    assert model.w.item() == pytest.approx(2, abs=1e-6)
    assert len(calls.seen) == 3
    assert rows.seen == [9.0]


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network, twelve inputs and their targets."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(12, 3, generator=generator)
    return model, x, x.sum(dim=1, keepdim=True).sin()


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_opt_c_is_the_hand_written_loop(line_search: str | None) -> None:
    """LBFGS keeps a history over batches; with a line search it calls the closure more often."""
    options: dict[str, Any] = {"lr": 0.5, "max_iter": 5, "line_search_fn": line_search}
    model, x, y = regression()
    optimizer = torch.optim.LBFGS(model.parameters(), **options)
    calls: list[float] = []
    for _ in range(3):
        for part in (slice(0, 5), slice(5, 10), slice(10, 12)):

            def closure(part: slice = part) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x[part]), y[part])
                loss.backward()
                calls.append(float(loss.detach()))
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]

    ours, _, _ = regression()
    losses = watch("on_backward", lambda t: float(t.loss.detach()))
    task = Task(
        model=ours,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.LBFGS(ours.parameters(), **options),
        train=Data(TensorData(x, y), 5, shuffle=False),
        train_step="closure",
        phases=Phases(epochs=3),
    )
    train(task, losses=losses)
    assert_same(ours, model)
    assert losses.seen == calls


def test_opt_c_the_meters_see_the_first_call_alone() -> None:
    class Counting(Distance):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    task = lbfgs_task(Counting())
    train(task)
    assert float(task.meter_sets["train"].compute()["train/loss"]) == 9.0


@pytest.mark.parametrize("options", [{"micro_batch_size": 1}, {"accumulate": 2}], ids=str)
def test_opt_c_a_window_of_several_micro_batches_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"data.train.{next(iter(options))}: it cuts a batch"):
        train(lbfgs_task(Distance(), data=options))


def test_opt_c_a_scaler_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision: an optimizer that calls a closure"):
        train(lbfgs_task(Distance(), precision="float16"))


def test_opt_c_lbfgs_without_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_step: LBFGS asks for the loss several times"):
        train(lbfgs_task(Distance(), train_step="standard"))


def test_opt_c_a_skipped_closure_moves_nothing() -> None:
    model = Distance()
    skip = watch("on_gradients", lambda t: t.skip_update("asked for by the test"), order=50)
    calls = watch("on_backward", lambda t: None)
    assert train(lbfgs_task(model), skip=skip, calls=calls).updates == 0
    assert float(model.w) == 5
    assert len(calls.seen) == 1


# --- truncated backpropagation ---

STEPS, PIECE = 12, 4


class Recurrent(nn.Module):
    """An LSTM whose state is nested as asked for."""

    def __init__(self, nest: str) -> None:
        super().__init__()
        self.nest = nest
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.lstm = nn.LSTM(3, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, (h, c) = self.lstm(x, None if state is None else self._unpack(state))
        return self.head(output), self._pack(h, c)

    def _pack(self, h: Tensor, c: Tensor) -> Any:
        nests: dict[str, Any] = {
            "tuple": (h, c),
            "dict": {"deep": [{"h": h}, ("a string", c)], "count": 3, "none": None},
        }
        return nests[self.nest]

    def _unpack(self, state: Any) -> tuple[Tensor, Tensor]:
        if self.nest == "tuple":
            return state  # type: ignore[no-any-return]
        return state["deep"][0]["h"], state["deep"][1][1]


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(8, STEPS, 3, generator=generator),
        torch.randn(8, STEPS, 2, generator=generator),
    )


def sequence_task(model: nn.Module, stateful: bool = False, **options: Any) -> Task:
    data = options.pop("data", {})
    options.setdefault("phases", Phases(epochs=2))
    return Task(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        train=Data(TensorData(*sequences()), 4, **{"shuffle": False, **data}),
        train_step=TruncatedBackpropagation(PIECE, stateful=stateful),
        **options,
    )


def sequences_by_hand(nest: str, stateful: bool) -> tuple[Recurrent, list[float]]:
    model = Recurrent(nest)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = sequences()
    losses = []
    for _ in range(2):
        state = None
        for k in range(2):
            state = state if stateful else None
            for t in range(0, STEPS, PIECE):
                part = (slice(4 * k, 4 * k + 4), slice(t, t + PIECE))
                hidden = None if state is None else model._unpack(state)
                output, state = model(x[part], state if hidden else None)
                loss = nn.functional.mse_loss(output, y[part])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                h, c = model._unpack(state)
                state = model._pack(h.detach(), c.detach())
                losses.append(float(loss))
    return model, losses


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("nest", ["tuple", "dict"])
def test_opt_d_is_the_hand_written_loop(nest: str, stateful: bool) -> None:
    model = Recurrent(nest)
    task = sequence_task(model, stateful)
    losses = watch("on_loss_and_meter", lambda t: float(t.loss.detach()))
    steps = watch("on_update", lambda t: t.progress.updates)
    assert train(task, losses=losses, steps=steps).updates == 4

    expected, by_hand_losses = sequences_by_hand(nest, stateful)
    assert_same(model, expected)
    assert losses.seen == by_hand_losses
    assert steps.seen == [k for k in range(4) for _ in range(STEPS // PIECE)]


def test_opt_d_no_graph_reaches_back() -> None:
    """The carried state has no graph, and the loss's graph has one piece of LSTM steps in it."""
    task = sequence_task(Recurrent("dict"), stateful=True)
    carried = watch("on_step", lambda t: [t.carry["deep"][0]["h"], t.carry["deep"][1][1]])
    train(task, carried=carried)
    assert all(not state.requires_grad for pair in carried.seen for state in pair)


def test_opt_d_the_reported_loss_is_the_mean_over_all_time_steps() -> None:
    """12 steps in pieces of 5, 5 and 2."""
    task = sequence_task(Recurrent("tuple"))
    task.train_step.length = 5  # type: ignore[attr-defined]
    losses = watch("on_loss_and_meter", lambda t: float(t.loss.detach()))
    Trainer(task, {"losses": losses}).train()
    weights = [5, 5, 2] * 2
    last = losses.seen[-6:]
    mean = sum(w * x for w, x in zip(weights, last, strict=True)) / sum(weights)
    assert float(task.meter_sets["train"].loss.compute()) == pytest.approx(mean, rel=1e-12)


def test_opt_d_stateful_batches_in_another_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_step\.stateful: a batch goes on"):
        train(sequence_task(Recurrent("tuple"), stateful=True, data={"shuffle": True}))


def test_opt_d_micro_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="cuts a batch into 2 micro-batches"):
        train(sequence_task(Recurrent("tuple"), data={"micro_batch_size": 2}))


def test_opt_d_micro_batches_of_a_stages_own_data_are_named_there() -> None:
    cut = Data(TensorData(*sequences()), 4, micro_batch_size=2)
    stages = [Stage(name="plain", updates=1), Stage(name="cut", updates=1, train=cut)]
    task = sequence_task(Recurrent("tuple"), phases=stages)
    with pytest.raises(ConfigError, match=r"phases\.cut\.data\.train\.micro_batch_size: it cuts"):
        train(task)


def test_opt_d_data_without_time_is_refused() -> None:
    task = sequence_task(Recurrent("tuple"))
    task.train_step.time_dim = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="input and target must be tensors"):
        train(task)
