"""Patience: the longer limit holds where a process may compile for the first time."""

from __future__ import annotations

from phaseloop.engine.backends import Single
from phaseloop.engine.patience import Patience


class Noting(Single):
    """Notes how long it was told to wait."""

    now = True

    def patient(self, on: bool) -> None:
        self.now = on


def test_it_ends_with_the_second_update_since_all_have_made_one_then() -> None:
    backend = Noting("cpu")
    patience = Patience(backend)
    patience.updated()
    assert backend.now
    patience.updated()
    assert not backend.now
    patience.begin()  # another stage
    assert backend.now


def test_it_comes_back_for_the_first_test_of_each_set() -> None:
    backend = Noting("cpu")
    patience = Patience(backend)
    patience.test_begins("test")
    patience.test_ends("test")
    assert backend.now  # a test before the first update
    patience.updated()
    patience.updated()
    for name, patient in (("test", False), ("other", True), ("other", False)):
        patience.test_begins(name)
        assert backend.now is patient
        patience.test_ends(name)
        assert not backend.now
