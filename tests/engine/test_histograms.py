"""Histograms: the values of a tensor counted in equal intervals, and what has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phaseloop import ConfigError
from phaseloop.engine.backends import Single
from phaseloop.engine.histograms import BINS, Histogram, histogram_of
from phaseloop.engine.shown import HISTOGRAM, TEXT, Shown


def given(tensor: Any) -> list[Histogram]:
    """What a sink gets."""
    shown, found = Shown(), list[Histogram]()
    shown.sinks[HISTOGRAM].append(lambda name, thing, update: found.append(thing))
    shown.add_histogram("h", tensor)
    shown.give(7, Single())
    return found


def drawn(seed: int = 0) -> Tensor:
    return torch.randn(30, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_counts_as_numpy_does() -> None:
    x = drawn()
    (found,) = given(x)
    counts, edges = np.histogram(x.numpy(), bins=BINS)
    assert found.counts.tolist() == counts.tolist()
    assert found.limits().tolist() == pytest.approx(edges[1:].tolist())
    facts = [x.min(), x.max(), x.numel(), x.sum(), (x * x).sum()]
    assert found.facts.tolist() == pytest.approx([float(f) for f in facts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_the_device_are_taken(dtype: torch.dtype) -> None:
    x = drawn().to(dtype)
    (found,) = given(x)
    assert found.counts.sum() == x.numel()
    assert found.facts[:2].tolist() == [float(x.min()), float(x.max())]


def test_whole_numbers_and_truth_values() -> None:
    (found,) = given(torch.tensor([0, 1, 1, 64]))
    # Intervals are 1 wide: 0 is in the first, 1 in the second, and the greatest in the last.
    assert found.counts.nonzero().flatten().tolist() == [0, 1, 63]
    assert found.counts[[0, 1, 63]].tolist() == [1, 2, 1]
    (found,) = given(torch.tensor([True, True, False]))
    assert found.counts[0] == 1 and found.counts[-1] == 2


def test_what_is_not_finite_is_left_out() -> None:
    inf, nan = float("inf"), float("nan")
    (found,) = given(torch.tensor([nan, 1.0, inf, 3.0, -inf]))
    assert found.facts.tolist() == pytest.approx([1.0, 3.0, 2.0, 4.0, 10.0])
    assert found.counts.sum() == 2
    assert given(torch.tensor([nan, inf])) == given(torch.tensor([])) == []


def test_equal_values_are_in_the_first_interval() -> None:
    (found,) = given(torch.full((5,), -2.5))
    assert found.counts.tolist() == [5] + [0] * (BINS - 1)
    assert set(found.limits().tolist()) == {-2.5}


def test_the_width_of_what_float32_holds_does_not_overflow() -> None:
    most = torch.finfo(torch.float32).max
    (found,) = given(torch.tensor([-most, 0.0, most]))
    assert found.counts.nonzero().flatten().tolist() == [0, BINS // 2, BINS - 1]
    assert torch.isfinite(found.limits()).all() and torch.isfinite(found.facts).all()


def test_of_a_sparse_tensor_what_it_holds() -> None:
    index, values = torch.tensor([[0, 3, 3]]), torch.tensor([1.0, 2.0, 5.0])
    x = torch.sparse_coo_tensor(index, values, (100,), check_invariants=True)
    (found,) = given(x)
    assert found.facts.tolist() == pytest.approx([1.0, 7.0, 2.0, 8.0, 50.0])


def test_it_is_counted_as_the_values_are_now() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    shown, found = Shown(), list[Histogram]()
    shown.sinks[HISTOGRAM].append(lambda name, thing, update: found.append(thing))
    shown.add_histogram("h", x)
    x.detach().zero_()
    shown.give(1, Single())
    assert found[0].facts[:2].tolist() == [1.0, 2.0]


def test_where_nobody_writes_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from phaseloop.engine import histograms

    monkeypatch.setattr(histograms, "histogram_of", None)
    shown = Shown()
    shown.add_histogram("h", torch.ones(1))
    shown.add_text("t", "text")
    assert not shown.waiting


@pytest.mark.parametrize("what", [[1.0], torch.zeros(2, dtype=torch.complex64)])
def test_what_has_no_order_is_refused_by_name(what: Any) -> None:
    with pytest.raises(ConfigError, match=r"record_histogram\('h'\)"):
        Shown().add_histogram("h", what)


def test_names_and_texts_are_looked_at() -> None:
    for name in ("", " ", "/", 3):
        with pytest.raises(ConfigError, match="name"):
            Shown().add_histogram(name, torch.ones(1))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="name"):
            Shown().add_text(name, "text")  # type: ignore[arg-type]
    shown = Shown()
    shown.sinks[TEXT].append(lambda *args: None)
    with pytest.raises(ConfigError, match=r"record_text\('t'\).*int"):
        shown.add_text("t", 3)  # type: ignore[arg-type]


def test_a_histogram_without_values_is_none() -> None:
    assert histogram_of(torch.zeros(0, 3)) is None
