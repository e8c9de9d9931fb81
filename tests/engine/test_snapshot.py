"""The snapshot: equal to what it was taken of, changed by nothing, in memory that is used again."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop.engine.checkpoint.snapshot import Snapshot, compact
from tests.rigs.equal import differ


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for item in tree for t in tensors(item)] if isinstance(tree, (list, tuple)) else []


def saved(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def state() -> dict[str, Any]:
    """What a checkpoint holds: a model's state, its momentum, plain Python, shared things."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv2d(2, 2, 3))
    model.to(memory_format=torch.channels_last)
    shared = ["a", 1.5]
    return {
        "model": model.state_dict(),
        "momentum": {"0.weight": torch.randn(4, 3), "count": torch.tensor(3)},
        "half": torch.randn(5).to(torch.bfloat16),
        "empty": [torch.empty(0), torch.empty(0, 3)],
        "parameter": nn.Parameter(torch.randn(2)),
        "plain": {"list": [1, [2.0, None], ("x", b"y", True)], "set": {1, 2}},
        "shared": [shared, shared, tuple(range(5))],
    }


def test_a_copy_is_equal_and_gives_the_same_bytes() -> None:
    tree = state()
    copied = Snapshot().take(tree)
    assert list(differ("tree", tree, copied)) == []
    assert saved(copied) == saved(tree) == saved(compact(tree))
    assert type(copied["model"]) is OrderedDict
    assert copied["model"]._metadata == tree["model"]._metadata
    assert type(copied["parameter"]) is nn.Parameter and copied["parameter"].requires_grad
    weight = tree["model"]["2.weight"]
    assert copied["model"]["2.weight"].stride() == weight.stride() != weight.contiguous().stride()


def test_nothing_that_is_done_to_the_state_is_seen_in_the_copy() -> None:
    tree, snapshot = state(), Snapshot()
    before = saved(tree)
    copied = snapshot.take(tree)
    for tensor in tensors(tree):
        tensor.detach().add_(1)
    tree["plain"]["list"][1].append("more")
    tree["plain"]["set"].add(3)
    tree["shared"][0][0] = "b"
    tree["momentum"]["new"] = torch.zeros(1)
    tree["model"]._metadata["0"]["version"] = 99
    assert saved(copied) == before


def test_tensors_in_a_set_are_copied_too() -> None:
    live = torch.zeros(2)
    copied = Snapshot().take({"set": {live}, "same": live})
    live.add_(1)
    assert copied["set"] == {copied["same"]} and copied["same"].tolist() == [0, 0]


def test_one_piece_of_memory_that_is_read_in_two_ways_is_not_tied() -> None:
    z = torch.complex(torch.ones(2), torch.ones(2))
    tree = {"z": z, "conjugate": z.conj(), "imaginary": z.imag, "negative": z.conj().imag}
    assert tree["negative"].is_neg()
    copied = Snapshot().take(tree)
    for name, value in tree.items():
        assert torch.equal(copied[name], value), name


def test_memory_is_used_again_where_the_shape_is_the_same() -> None:
    tree, snapshot = state(), Snapshot()
    first = {id_of(t) for t in tensors(snapshot.take(tree)) if t.numel()}
    tree["momentum"]["0.weight"].mul_(2)
    copied = snapshot.take(tree)
    assert {id_of(t) for t in tensors(copied) if t.numel()} == first
    assert list(differ("tree", tree, copied)) == []
    tree["half"] = torch.randn(5)  # another type
    tree["momentum"]["0.weight"] = torch.randn(3, 4)  # another shape
    copied = snapshot.take(tree)
    assert list(differ("tree", tree, copied)) == []
    assert len({id_of(t) for t in tensors(copied) if t.numel()} - first) == 2


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def size_of(snapshot: Snapshot) -> int:
    return sum(buffer.untyped_storage().nbytes() for _, buffer in snapshot._kept.values())


def test_there_is_one_copy_and_what_is_gone_is_let_go() -> None:
    snapshot = Snapshot()
    tree = {"a": torch.zeros(100), "b": [torch.zeros(50), torch.zeros(7)]}
    for _ in range(3):
        snapshot.take(tree)
        assert size_of(snapshot) == 4 * 157
    tree["b"].pop()
    snapshot.take(tree)
    assert size_of(snapshot) == 4 * 150
    for length in range(1, 20):  # grows, as a list of best scores may
        snapshot.take({"a": torch.zeros(length)})
        assert size_of(snapshot) == 4 * length


def test_tied_tensors_stay_tied_and_are_copied_once() -> None:
    weight = torch.randn(4, 4)
    tree = {"in": weight, "out": weight.detach(), "same": [weight]}
    snapshot = Snapshot()
    copied = snapshot.take(tree)
    assert copied["in"] is copied["same"][0]
    assert copied["out"].data_ptr() == copied["in"].data_ptr() != weight.data_ptr()
    assert size_of(snapshot) == weight.nbytes
    assert saved(copied) == saved(tree)


@pytest.mark.parametrize("take", [lambda tree: Snapshot().take(tree), compact])
def test_a_part_of_something_large_is_copied_alone(take: Any) -> None:
    large = torch.arange(1000.0)
    tree = {"part": large[10:20], "steps": large[::100], "row": large.view(10, 100)[3], "t": 1}
    copied = take(tree)
    assert list(differ("tree", tree, copied)) == []
    assert [t.untyped_storage().nbytes() for t in tensors(copied)] == [40, 40, 400]
    expanded = take(torch.zeros(1).expand(5))
    assert expanded.tolist() == [0.0] * 5


def test_without_need_nothing_is_copied() -> None:
    tree = {"a": torch.randn(3, 3), "t": torch.randn(3, 4).t(), "p": nn.Parameter(torch.ones(2))}
    assert [t.data_ptr() for t in tensors(compact(tree))] == [t.data_ptr() for t in tensors(tree)]


def test_no_graph_is_copied() -> None:
    w = torch.ones(3, requires_grad=True)
    snapshot = Snapshot()
    for _ in range(2):
        copied = snapshot.take({"w": w.detach(), "leaf": w})
        assert not copied["w"].requires_grad and copied["leaf"].requires_grad
        assert copied["leaf"].grad_fn is None and copied["leaf"].is_leaf
