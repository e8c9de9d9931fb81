"""Typed conversion: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from phaseloop.engine.config.typed import convert, to_dataclass
from phaseloop.engine.errors import ConfigError


@dataclass
class Inner:
    size: int
    names: list[str] = field(default_factory=list)


@dataclass
class Outer:
    inner: Inner
    rate: float = 0.1
    mode: Literal["a", "b"] = "a"
    other: Inner | None = None


def refusal(annotation: Any, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        convert(annotation, value, "some.key")
    return str(caught.value)


def test_only_an_int_for_a_float_is_changed():
    value = convert(float, 3, "k")
    assert value == 3.0 and type(value) is float
    assert type(convert(float | None, 3, "k")) is float
    assert type(convert(int | float, 3, "k")) is int


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 1.0),
        (int, True),
        (bool, 1),
        (float, True),
        (float, "1e-3"),
        (str, 3),
        (int, None),
        (list[int], [1, "2"]),
        (list[int], 3),
        (dict[str, int], {"a": "b"}),
        (Literal["x"], "y"),
        (float | torch.Tensor, "1e-3"),
        (int | None, "3"),
    ],
)
def test_nothing_is_guessed(annotation, value):
    assert refusal(annotation, value).startswith("some.key")


def test_the_words_of_a_refusal():
    assert refusal(int | None, "a") == "some.key: 'a' is not int or null"
    assert "it is quoted" in refusal(float, "1e-3")
    assert refusal(Literal["x", "y"], "z") == "some.key: 'z' is not 'x' or 'y'"
    assert "null is not int" in refusal(int, None)
    assert "a value is needed" in refusal(int, "???")


def test_types_of_others_are_left_to_them():
    assert convert(torch.Tensor, [1.0], "k") == [1.0]
    assert convert(Any, object, "k") is object
    assert convert(Callable[..., Any] | None, None, "k") is None


def test_nested_dataclasses_name_the_full_path():
    made = to_dataclass(Outer, {"inner": {"size": 3, "names": ["a"]}, "rate": 1}, "root")
    assert made == Outer(Inner(3, ["a"]), 1.0)
    with pytest.raises(ConfigError, match=r"^root\.inner\.size: a value is needed"):
        to_dataclass(Outer, {"inner": {}}, "root")
    with pytest.raises(ConfigError, match=r"^root\.other\.sise: .*Did you mean 'size'"):
        to_dataclass(Outer, {"inner": {"size": 1}, "other": {"sise": 1}}, "root")
    with pytest.raises(ConfigError, match=r"^root\.inner\.names\.1: 2 is not str"):
        to_dataclass(Outer, {"inner": {"size": 1, "names": ["a", 2]}}, "root")


@dataclass
class Checked:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}")


def test_a_value_that_the_class_refuses_is_named_with_its_path():
    assert to_dataclass(Checked, {"size": 2}, "root.inner") == Checked(2)
    with pytest.raises(ConfigError, match=r"^root\.inner: size is 0"):
        to_dataclass(Checked, {"size": 0}, "root.inner")
