"""Shards: whole on the way out, cut on the way in, measured whole; on three real processes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop.engine import shards
from phaseloop.engine.backends.fsdp import Fsdp
from tests.rigs import ranks
from tests.rigs.sharded import Net

SHAPES = [(7, 2), (3,), (2, 2), (1,), (4, 0)]
"""On three processes: 3+3+1 rows, one each, the last with none, two with none, and no element."""


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class _Holder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def _cut() -> tuple[Fsdp, list[Any], list[Tensor]]:
    """A model whose parameters these tensors are, and its sharded parameters."""
    holder = _Holder()
    for number, tensor in enumerate(_tensors()):
        holder.register_parameter(f"p{number}", nn.Parameter(tensor))
    backend = Fsdp("cpu")
    backend.setup()
    backend.prepare_model(holder)
    return backend, list(holder.parameters()), _tensors()


def _round_trip() -> None:
    backend, cut, there = _cut()
    assert all(map(shards.is_shard, cut)) and not any(map(shards.is_shard, there))
    assert sum(shards.local(p).numel() for p in cut) < sum(t.numel() for t in there)
    for parameter, tensor in zip(cut, there, strict=True):
        again = shards.share_of(tensor, parameter)
        assert torch.equal(shards.local(again), shards.local(parameter))
        # A part, and not a view that keeps the whole.
        assert shards.local(again).untyped_storage().nbytes() == shards.local(again).nbytes
        assert torch.equal(shards.whole(again, keep=True), tensor)
        assert shards.share_of(again, parameter) is again
        assert shards.share_of(tensor, tensor) is tensor
        assert shards.share_of(torch.zeros(9), parameter).shape == (9,)  # as large as no parameter
    backend.teardown()


def test_round_trip() -> None:
    ranks.results(_round_trip, processes=3)


def _tree(rank_that_keeps: int) -> None:
    backend, cut, there = _cut()
    keep = backend.rank == rank_that_keeps
    plain = torch.ones(2)
    state = OrderedDict(a=cut[0].detach(), tied=cut[0].detach(), plain=plain)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    rest = [1, "two", {"three": plain}]
    tree = {"state": state, "list": [cut[1], (cut[2], 3)], "rest": rest}
    made: set[int] = set()
    got = shards.whole(tree, keep, made)
    assert got["rest"] is rest and got["state"]["plain"] is plain
    assert got["state"]._metadata == {"": {"version": 1}}
    found = [got["state"]["a"], got["list"][0], got["list"][1][0]]
    if keep:
        assert all(torch.equal(x, y) for x, y in zip(found, there, strict=False))
        assert all(type(x) is Tensor for x in found)
        assert got["state"]["tied"] is got["state"]["a"]
        assert made == {id(x) for x in found}
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)
    else:
        assert found == [None] * 3 and not made
    backend.teardown()


def test_a_tree_is_whole_for_one_and_nothing_for_others() -> None:
    ranks.results(_tree, 1, processes=3)


def _norms() -> None:
    backend, cut, there = _cut()
    # Whole ones among them, as scalars and a criterion's parameters are.
    mixed = [*cut, torch.tensor([3.0, 4.0])]
    whole = [*there, torch.tensor([3.0, 4.0])]
    for p in (1.0, 2.0, 3.0, float("inf")):
        got = shards.norms(mixed, p)
        wanted = torch.stack([t.norm(p) if t.numel() else torch.zeros(()) for t in whole])
        assert type(got) is Tensor and torch.allclose(got, wanted, rtol=1e-6)
    # The squares of what two of three processes have are more than float16 can hold.
    (half,) = shards.norms([(cut[0] * 0 + 300).half()])
    assert half.item() == pytest.approx(300.0 * there[0].numel() ** 0.5, rel=2**-10)
    if backend.rank == 0:
        shards.local(cut[0])[0, 0] = float("nan")
        shards.local(cut[1])[0] = -float("inf")
    for p in (2.0, float("inf")):
        got = shards.norms(mixed, p)
        assert got[0].isnan() and got[1] == float("inf") and got[2:].isfinite().all()
    backend.teardown()


def test_norms_are_those_of_the_whole_on_every_process() -> None:
    ranks.results(_norms, processes=3)


def test_what_is_not_sharded_stays_as_it_is() -> None:
    net = Net()
    state = net.state_dict()
    assert shards.whole(state, keep=False) is state
    assert shards.local(net.one) is net.one
    assert shards.shares_of(state, state) == dict(state)
    assert shards.class_name(net) == "Net" and shards.class_name(nn.ReLU()) == "ReLU"
