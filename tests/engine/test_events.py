"""Events: who is called, in which order, and what unheard events cost."""

from __future__ import annotations

from typing import Any

import pytest

from phaseloop import ConfigError, Hook, Order
from phaseloop.engine.events import EVENTS, Dispatcher

PER_STEP = [event for event in EVENTS if event not in ("on_exception", "on_end")]


def hook_of(order: int = Order.DEFAULT, **events: Any) -> Hook:
    """A hook that overrides these events with plain functions."""
    return type("Made", (Hook,), {"order": order, **events})()


def noting(calls: list[Any], name: str) -> Any:
    return lambda self, *args: calls.append((name, *args))


def test_the_events_are_these() -> None:
    assert EVENTS == (
        "on_start", "on_resume", "on_phase_start", "on_forward", "on_loss_and_meter",
        "on_backward", "on_gradients", "on_update", "on_step", "on_phase_end", "on_loop_end",
        "on_exception", "on_end",
    )  # fmt: skip


@pytest.mark.parametrize("event", PER_STEP)
def test_a_listener_is_called_with_the_task(event: str) -> None:
    calls: list[Any] = []
    dispatcher = Dispatcher({"one": hook_of(**{event: noting(calls, "one")})})
    getattr(dispatcher, event)("the task")
    assert calls == [("one", "the task")]
    for other in PER_STEP:
        if other != event:
            getattr(dispatcher, other)("the task")
    assert len(calls) == 1


@pytest.mark.parametrize("event", PER_STEP)
def test_an_event_that_nobody_hears_calls_no_method(event: str) -> None:
    dispatcher = Dispatcher({"deaf": hook_of(), "deafer": Hook()})
    assert dispatcher.listeners(event) == []
    assert getattr(dispatcher, event) is getattr(Dispatcher({}), event)
    getattr(dispatcher, event)("the task")


def test_one_listener_is_called_directly() -> None:
    hook = hook_of(on_step=lambda self, task: None)
    assert Dispatcher({"deaf": Hook(), "one": hook}).on_step == hook.on_step


def test_order_comes_first_and_the_place_in_the_mapping_second() -> None:
    calls: list[Any] = []
    names = {"d": 50, "a": 10, "e": 50, "b": 10, "f": 99, "c": 20}
    hooks = {name: hook_of(order, on_step=noting(calls, name)) for name, order in names.items()}
    dispatcher = Dispatcher(hooks)
    dispatcher.on_step("t")
    assert [name for name, _ in calls] == list("abcdef")
    assert dispatcher.listeners("on_step") == list("abcdef")
    assert list(dispatcher.hooks) == list("abcdef")


def test_a_hook_may_choose_its_order_for_itself() -> None:
    late, early = hook_of(on_step=lambda s, t: None), hook_of(on_step=lambda s, t: None)
    early.order = Order.LEARNING_RATE  # type: ignore[misc]
    assert Dispatcher({"late": late, "early": early}).listeners("on_step") == ["early", "late"]


def test_a_method_inherited_from_another_hook_is_heard() -> None:
    calls: list[Any] = []
    base = type("Base", (Hook,), {"on_step": noting(calls, "base")})
    Dispatcher({"child": type("Child", (base,), {})()}).on_step("t")
    assert calls == [("base", "t")]


def test_every_hook_gets_the_key_of_the_mapping_as_its_name() -> None:
    one, other = Hook(), Hook()
    Dispatcher({"one": one, "other": other})
    assert (one.name, other.name) == ("one", "other")


def test_the_documented_order_holds() -> None:
    assert (
        Order.SYNC_METERS < Order.BARRIER < Order.LEARNING_RATE < Order.FREEZE < Order.FINITE
        < Order.DEFAULT < Order.AVERAGE < Order.STOP < Order.LOG < Order.CHECKPOINT
    )  # fmt: skip


def test_what_is_no_hook_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.mine.*dict") as error:
        Dispatcher({"mine": {}})  # type: ignore[dict-item]
    assert error.value.key == "hooks.mine"


def test_nothing_comes_after_the_checkpoint() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.late.*101.*100"):
        Dispatcher({"late": hook_of(Order.CHECKPOINT + 1)})
    with pytest.raises(ConfigError, match=r"hooks\.as_late"):
        Dispatcher({"as_late": hook_of(Order.CHECKPOINT)})
    saving = hook_of(Order.CHECKPOINT)
    type(saving).saves = True  # type: ignore[misc]
    Dispatcher({"last": saving})


def test_a_misspelt_event_is_found() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.mine: .*'on_pahse_end'.*'on_phase_end'"):
        Dispatcher({"mine": hook_of(on_pahse_end=lambda s, t: None)})


def test_an_error_in_a_usual_event_stops_there() -> None:
    calls: list[Any] = []

    def fail(self: Hook, task: Any) -> None:
        raise ValueError("first")

    hooks = {"bad": hook_of(on_step=fail), "good": hook_of(on_step=noting(calls, "good"))}
    with pytest.raises(ValueError, match="first"):
        Dispatcher(hooks).on_step("t")
    assert calls == []


def test_isolated_calls_reach_everyone_and_report_every_error() -> None:
    calls: list[Any] = []

    def fail(self: Hook, task: Any, error: Any) -> None:
        raise ValueError(self.name)

    hooks = {
        "a": hook_of(on_exception=fail),
        "b": hook_of(on_exception=noting(calls, "b")),
        "c": hook_of(on_exception=fail),
        "d": hook_of(on_exception=noting(calls, "d")),
    }
    errors = Dispatcher(hooks).call_isolated("on_exception", "t", "e")
    assert calls == [("b", "t", "e"), ("d", "t", "e")]
    assert [str(error) for error in errors] == ["a", "c"]


def with_state(state: dict[str, Any]) -> Any:
    def load(self: Any, given: dict[str, Any]) -> None:
        self.given = given

    return hook_of(state_dict=lambda self: dict(state), load_state_dict=load)


def test_states_go_by_name_and_empty_ones_are_left_out() -> None:
    hooks = {"a": with_state({"n": 1}), "b": with_state({}), "c": with_state({"n": 3})}
    states = Dispatcher(hooks).state_dict()
    assert states == {"a": {"n": 1}, "c": {"n": 3}}
    fresh = {"c": with_state({}), "a": with_state({}), "new": with_state({})}
    left_over = Dispatcher(fresh).load_state_dict({**states, "gone": {"n": 9}})
    assert left_over == ["gone"]
    assert fresh["a"].given == {"n": 1}
    assert fresh["c"].given == {"n": 3}
    assert not hasattr(fresh["new"], "given")
