"""Transfer: tensors in a batch of any shape are moved, everything else is passed through."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from phaseloop.engine.data.transfer import to_device

META = torch.device("meta")  # a device that is not the CPU, and everywhere


def moved(data: Any) -> Any:
    return to_device(data, META)


def one() -> Tensor:
    return torch.ones(2)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Item:
    x: Tensor
    name: str
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass
class WithDerived:
    x: Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class Graph:
    """A type of a user's own that knows how to move itself."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(device)


class Fixed(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_a_tensor() -> None:
    assert moved(one()).device == META
    tensor = one()
    assert to_device(tensor, torch.device("cpu")) is tensor


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_keeps_its_kind_and_what_is_no_tensor(kind: type) -> None:
    result = moved(kind([one(), "text", 3, None, (one(),)]))
    assert type(result) is kind
    assert result[0].device == META
    assert result[1:4] == kind(["text", 3, None])
    assert result[4][0].device == META


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Fixed])
def test_a_mapping_keeps_its_kind_and_order(kind: Any) -> None:
    result = moved(kind({"b": one(), "a": {"deep": [one()]}, "c": "text"}))
    assert type(result) is kind
    assert list(result) == ["b", "a", "c"]
    assert result["b"].device == META
    assert result["a"]["deep"][0].device == META
    assert result["c"] == "text"


def test_a_named_tuple() -> None:
    result = moved(Pair(one(), Pair(1, one())))
    assert type(result) is Pair
    assert result.x.device == META
    assert result.y.y.device == META
    assert result.y.x == 1


def test_a_dataclass() -> None:
    given = Item(one(), "name", [one()])
    result = moved(given)
    assert type(result) is Item
    assert result.x.device == META
    assert result.more[0].device == META
    assert result.name == "name"
    assert given.x.device.type == "cpu"  # the dataset's own object is not changed
    assert moved(Frozen(one())).x.device == META
    derived = moved(WithDerived(one()))
    assert derived.x.device == META
    assert derived.size == 2


def test_a_dataclass_type_is_passed_through() -> None:
    assert moved(Item) is Item


def test_a_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    result = moved(packed)
    assert isinstance(result, PackedSequence)
    assert result.data.device == META


def test_a_type_that_moves_itself() -> None:
    assert moved([Graph()])[0].device == META


@pytest.mark.parametrize("value", [None, 3, 2.5, "text", b"bytes", {1, 2}, object(), np.ones(2)])
def test_everything_else_is_passed_through(value: Any) -> None:
    assert moved(value) is value


class Encoding(UserDict[str, Any]):
    """A mapping that knows more than its items, as tokenizers give."""

    def __init__(self, items: Any, note: str = "") -> None:
        super().__init__(items)
        self.note = note


def test_a_mapping_keeps_what_it_knows_beside_its_items() -> None:
    given = Encoding({"x": one()}, note="kept")
    result = moved(given)
    assert type(result) is Encoding
    assert result.note == "kept"
    assert result["x"].device == META
    assert given["x"].device.type == "cpu"


def test_a_mapping_with_a_default_keeps_it() -> None:
    given: defaultdict[str, Any] = defaultdict(list, x=one())
    result = moved(given)
    assert result["x"].device == META
    assert type(result) is defaultdict
    assert result["missing"] == []
