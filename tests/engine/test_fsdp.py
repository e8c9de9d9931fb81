"""Backend fsdp: the mathematics of one process on any number, and whole tensors on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phaseloop.engine.backends import Fsdp, messages
from phaseloop.engine.shards import is_shard, whole
from phaseloop.hooks.average import Average
from tests.rigs import equal, process, r1, ranks, sharded

TOLERANCE = 1e-10
"""Of what float64 sums in another order."""


def alone(folder: Path, **options: Any) -> dict[str, Any]:
    """What one process makes of it, in a new process."""
    result: dict[str, Any] = process.result(sharded.train, folder / "alone", **options)
    return result


def together(folder: Path, count: int = 2, **options: Any) -> list[dict[str, Any]]:
    """What several make of it, by rank."""
    return ranks.results(
        sharded.train, folder / "together", processes=count, backend="fsdp", **options
    )


def assert_close(folder: Path, one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    a, b = sharded.saved(folder / "alone"), sharded.saved(folder / "together")
    assert sharded.furthest(a, b) < TOLERANCE
    for each in several:
        assert sharded.furthest(one, each) < TOLERANCE


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_train_as_one_whatever_the_shapes(tmp_path: Path, count: int) -> None:
    options = {"test": 5}
    one = alone(tmp_path, **options)
    # Different weights at first: those of the primary are everyone's.
    several = together(tmp_path, count, seed=[0, 1, 2], **options)
    assert_close(tmp_path, one, several)


@pytest.mark.parametrize(
    "options",
    [
        {"micro": 1, "optimizer": "adamw", "clip": {"clip_norm": 0.5}},
        {"micro": 1, "clip": {"clip_norm": 0.5, "norm_type": float("inf")}},
        {"optimizer": "adagrad", "clip": {"clip_value": 0.01, "clip_norm": 0.05, "norm_type": 1}},
    ],
)
def test_windows_and_clipping(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_close(tmp_path, alone(tmp_path, **options), together(tmp_path, **options))


def test_averages_are_those_of_one_process_and_are_tested(tmp_path: Path) -> None:
    # Tests between which nothing is saved: what they leave in the model is trained on.
    options = {"test": 5, "test_every": 3, "hooks": {"average": Average(decay=0.5)}}
    assert_close(tmp_path, alone(tmp_path, **options), together(tmp_path, **options))


@pytest.mark.parametrize(
    "backend",
    [
        {"reduce_each": True},
        {"reshard_after_forward": False},
        pytest.param(
            {"reduce_unused": True},
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
                reason="this torch has no such option, and it is refused",
            ),
        ),
        {"reshard_after_forward": True, "shard": ["last", "blocks.0"]},
    ],
)
def test_no_option_changes_the_mathematics(tmp_path: Path, backend: dict[str, Any]) -> None:
    options = {"micro": 1, "test": 3, "epochs": 1}
    one = alone(tmp_path, **options)
    assert_close(tmp_path, one, together(tmp_path, options=backend, **options))


# --- the start ---

LIMIT = 40
"""Bytes in a message: a row of the rig's layers has 28, and the bias of three numbers 12."""


def begun() -> dict[str, Any]:
    """A network with other values on each process, made ready: what was sent, and when."""
    rank = int(os.environ["RANK"])
    net = sharded.model(rank, sharded.Net)
    net.register_buffer("counts", torch.arange(3) + rank)
    sent: list[tuple[int, list[str]]] = []
    broadcast = dist.broadcast

    def note(tensor: Tensor, **options: Any) -> Any:
        left = [name for name, p in net.named_parameters() if p.dim() and not is_shard(p)]
        sent.append((tensor.nbytes, left))
        return broadcast(tensor, **options)

    messages.MESSAGE = LIMIT
    dist.broadcast = note
    moved: list[list[str]] = []

    class Notes(Fsdp):
        def _give(self, tensors: list[Tensor]) -> None:
            names = {id(t): n for n, t in (*net.named_parameters(), *net.named_buffers())}
            moved.append([names[id(tensor)] for tensor in tensors])
            super()._give(tensors)

    backend = Notes("cpu")
    backend.setup()
    assert backend.prepare_model(net) is net
    state = whole(net.state_dict(), keep=True)
    tied = net.back.weight is net.first.weight
    backend.teardown()
    return {"sent": sent, "moved": moved, "state": state, "tied": tied}


def test_a_start_has_one_unit_whole_at_a_time_and_sends_it_in_pieces() -> None:
    found = ranks.results(begun)
    expected = {**sharded.model(0, sharded.Net).state_dict(), "counts": torch.arange(3)}
    for one in found:
        assert not list(equal.differ("", expected, dict(one["state"]))) and one["tied"]
        assert max(size for size, _ in one["sent"]) <= LIMIT
        # What is whole everywhere; then each unit, cut before the next; at last the rest.
        blocks = [[f"blocks.{n}.0.weight", f"blocks.{n}.0.bias"] for n in range(2)]
        rest = ["one", "first.weight", "norm.weight", "norm.bias", "last.weight", "last.bias"]
        assert one["moved"] == [["scale", "counts"], *blocks, rest]
        assert set(one["sent"][-1][1]) == set(rest)
    total = sum(t.nbytes for t in expected.values()) - expected["back.weight"].nbytes
    assert sum(size for size, _ in found[0]["sent"]) == total


# --- checkpoints ---


def ways(folder: Path, way: tuple[str, int], function: Any, **options: Any) -> list[Any]:
    """``function`` of the rig on one backend and number of processes, by rank."""
    backend, count = way
    if count == 1:
        return [process.result(function, folder, backend=backend, **options)]
    return ranks.results(function, folder, processes=count, backend=backend, **options)


def test_a_checkpoint_loads_anywhere_to_the_bit_and_goes_on_as_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "adamw", "clip": {"clip_norm": 0.5}}

    def average() -> dict[str, Any]:
        return {"hooks": {"average": Average(decay=0.5)}, **options}

    process.result(sharded.train, tmp_path / "whole", epochs=2, **average())
    end = sharded.saved(tmp_path / "whole")
    made: dict[tuple[str, int], Path] = {}
    for source, targets in {
        ("fsdp", 2): [("single", 1), ("ddp", 2), ("fsdp", 3), ("fsdp", 2)],
        ("single", 1): [("fsdp", 2)],
        ("ddp", 2): [("fsdp", 3)],
    }.items():
        made[source] = tmp_path / f"{source[0]}{source[1]}"
        ways(made[source], source, sharded.train, epochs=1, **average())
        before = sharded.saved(made[source])
        for target in targets:
            folder = tmp_path / f"{source[0]}{source[1]}-{target[0]}{target[1]}"
            shutil.copytree(made[source], folder)
            for seen in ways(folder, target, sharded.taken, epochs=2, **average()):
                assert not list(equal.differ("", before, seen)), (source, target)
            assert sharded.furthest(end, sharded.saved(folder)) < TOLERANCE, (source, target)


@pytest.mark.parametrize("kill", [r1.At("on_step", 5), r1.At("on_gradients", 6)])
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, kill: r1.At) -> None:
    options: dict[str, Any] = {"backend": "fsdp", "micro": 1, "test": 5, "epochs": 2,
                               "save": {"every_updates": 2}}  # fmt: skip

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks.results(sharded.train, whole, hooks={"average": Average()}, **options)
    ended = ranks.run(sharded.train, broken, hooks={"average": Average(), "kill": kill}, **options)
    assert [one.code for one in ended] == [-9, -9]
    ranks.results(sharded.train, broken, hooks={"average": Average()}, **options)
    equal.assert_eq(whole, broken)
