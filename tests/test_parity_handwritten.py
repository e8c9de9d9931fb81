"""Parity: the engine's training equals a hand-written loop bit for bit, with the same batches.

The loop below knows torch and nothing of the engine, except that it takes the order of the samples
from ``epoch_order`` and starts its generators from the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Gradients, Phases, Schedule, Task, TensorData, Trainer, Warmup
from phaseloop.engine import rng
from phaseloop.engine.data.order import epoch_order
from phaseloop.engine.schedules import cosine
from phaseloop.hooks.learning_rate import LearningRate

SEED = 7
SAMPLES, BATCH, EPOCHS = 42, 4, 3  # the last batch of an epoch has 2 samples
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
}


def network(dropout: float, norm: bool) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2)]
    return nn.Sequential(*(layers[:1] + [nn.BatchNorm1d(8)] * norm + layers[1:]))


def seed_generators() -> None:
    """The states that a run starts from: one 64-bit seed for all three generators."""
    seed = rng.mix(SEED, rng.START, 0)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def learning_rate(update: int, updates: int, base: float) -> float:
    """Warm-up from .001 in 5 updates, then half a cosine, written by hand."""
    warm = 5
    if update < warm:
        return 0.001 + (base - 0.001) * (update / updates) / (warm / updates)
    where = (update / updates - warm / updates) / (1 - warm / updates)
    return 0.5 * base * (1 + float(np.cos(np.pi * where)))


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro: int | None = None,
    clip: float | None = None,
    scheduled: bool = False,
    tested: bool = False,
) -> list[float]:
    """The hand-written loop; the loss of every micro-batch."""
    criterion = nn.CrossEntropyLoss()
    losses = []
    base = optimizer.param_groups[0]["lr"]
    updates, done = EPOCHS * -(-SAMPLES // BATCH), 0
    seed_generators()
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(SAMPLES, shuffle=True, seed=SEED, epoch=epoch).slice(0, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            batch = order[start : start + BATCH]
            pieces = [batch] if micro is None else batch.split(micro)
            for piece in pieces:
                loss = criterion(model(X[piece]), Y[piece])
                losses.append(float(loss.detach()))
                if len(pieces) > 1:
                    loss = loss * (len(piece) / len(batch))
                loss.backward()
            if scheduled:
                optimizer.param_groups[0]["lr"] = learning_rate(done, updates, base)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        if tested:
            model.eval()
            with torch.no_grad():
                for x, y in zip(X.split(8), Y.split(8), strict=True):
                    losses.append(float(criterion(model(x), y)))
            model.train()
    return losses


def by_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro: int | None = None,
    clip: float | None = None,
    scheduled: bool = False,
    tested: bool = False,
) -> list[float]:
    """The same by the engine."""
    losses: list[float] = []

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        losses.append(float(loss.detach()))
        return loss

    options: dict[str, Any] = {}
    if scheduled:
        options["schedule"] = Schedule(cosine(), warmup=Warmup(0.001, updates=5))
    if tested:
        options["test"] = Data(TensorData(X, Y), 8)
    task = Task(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        train=Data(TensorData(X, Y), BATCH, micro_batch_size=micro),
        phases=Phases(epochs=EPOCHS),
        gradients=Gradients(clip_norm=clip),
        seed=SEED,
        **options,
    )
    Trainer(task, {"learning_rate": LearningRate()} if scheduled else {}).train()
    return losses


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dropout": 0.1},
        {"norm": True, "tested": True},
        {"dropout": 0.1, "norm": True, "clip": 0.1, "micro": 2, "tested": True},
        {"dropout": 0.1, "scheduled": True},
    ],
    ids=lambda how: "-".join(how) or "plain",
)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_bit_for_bit(name: str, how: dict[str, Any]) -> None:
    settings = dict(how)
    kind = {"dropout": settings.pop("dropout", 0.0), "norm": settings.pop("norm", False)}
    results = []
    for loop in (by_hand, by_engine):
        model = network(**kind)
        optimizer = OPTIMIZERS[name](model)
        losses = loop(model, optimizer, **settings)
        results.append((losses, model.state_dict(), optimizer.state_dict()["state"]))
    (hand_losses, hand, hand_state), (losses, ours, our_state) = results
    assert losses == hand_losses
    assert ours.keys() == hand.keys()
    for key, value in hand.items():
        assert torch.equal(ours[key], value), key
    assert our_state.keys() == hand_state.keys()
    for number, entries in hand_state.items():
        for key, value in entries.items():
            assert torch.equal(our_state[number][key], value), (number, key)


def test_the_generators_end_where_the_hand_written_loop_leaves_them() -> None:
    states = []
    for loop in (by_hand, by_engine):
        model = network(0.1, False)
        loop(model, OPTIMIZERS["sgd"](model))
        states.append((torch.get_rng_state(), random.random(), np.random.rand()))
    (hand_torch, *hand), (our_torch, *ours) = states
    assert torch.equal(our_torch, hand_torch)
    assert ours == hand


def test_dropout_and_the_order_of_the_samples_matter() -> None:
    """The comparison above can fail: another seed of either gives other losses."""
    first = by_hand(model := network(0.1, False), OPTIMIZERS["sgd"](model))
    plain = by_hand(model := network(0.0, False), OPTIMIZERS["sgd"](model))
    assert first != plain
