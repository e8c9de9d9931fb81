"""Registries: names are found, nearest names are offered, a second entry is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from phaseloop import RegistryError
from phaseloop.engine import registry
from phaseloop.engine.registry import Registry, register_hook


def one() -> int:
    return 1


def two() -> int:
    return 2


@pytest.fixture
def things() -> Registry:
    made = Registry("thing")
    made.register("first", colour="red")(one)
    return made


def test_an_entry_is_found_with_what_it_declared(things: Registry) -> None:
    entry = things.get("first")
    assert entry.target is one
    assert dict(entry.declared) == {"colour": "red"}
    with pytest.raises(TypeError):
        entry.declared["colour"] = "blue"  # type: ignore[index]
    assert "first" in things
    assert "second" not in things
    assert [entry.name for entry in things] == ["first"]


def test_the_decorator_gives_back_what_it_decorates(things: Registry) -> None:
    assert things.register("second")(two) is two


def test_an_unknown_name_is_an_error_with_the_nearest_and_all(things: Registry) -> None:
    things.register("other")(two)
    with pytest.raises(RegistryError) as error:
        things.get("frist")
    message = str(error.value)
    assert "no thing is called 'frist'" in message
    assert "Did you mean 'first'?" in message
    assert "first, other" in message
    assert "imports" in message
    assert error.value.__cause__ is None


def test_a_name_like_no_other_gets_no_suggestion(things: Registry) -> None:
    with pytest.raises(RegistryError) as error:
        things.get("zzz")
    assert "Did you mean" not in str(error.value)


def test_a_second_entry_is_refused_with_the_places_of_both(things: Registry) -> None:
    with pytest.raises(RegistryError) as error:
        things.register("first")(two)
    for function in (one, two):
        line = inspect.getsourcelines(function)[1]
        assert f"{Path(__file__).name}:{line}" in str(error.value)
    assert things.get("first").target is one


def test_an_entry_may_be_replaced_on_request(things: Registry) -> None:
    things.register("first", replace=True)(two)
    assert things.get("first").target is two


def test_an_object_without_a_source_is_placed_by_its_name(things: Registry) -> None:
    things.register("length")(len)
    assert "len" in things.get("length").place


def test_a_list_may_change_while_it_is_gone_through(things: Registry) -> None:
    for _ in things:
        things.register("another", replace=True)(two)
    assert "another" in things


def test_what_ships_declares_what_the_engine_asks_for() -> None:
    import phaseloop.hooks
    import phaseloop.train_steps  # noqa: F401 registers

    for entry in registry.hooks:
        assert isinstance(entry.declared["default"], bool)
    standard = registry.train_steps.get("standard")
    assert standard.declared["whole_model_forward"] is True


def test_a_hook_is_not_a_default_unless_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "hooks", Registry("hook"))
    register_hook("quiet")(object)
    register_hook("always", default=True)(object)
    assert {e.name: e.declared["default"] for e in registry.hooks} == {
        "quiet": False,
        "always": True,
    }
