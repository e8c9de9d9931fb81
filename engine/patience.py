"""Patience: when the processes of a run wait longer for one another: where one may compile.

That is until each has made its first updates, also those of a later stage, and for the first test
of each set: the limits are ``backend.start_timeout`` there and ``backend.timeout`` elsewhere.
"""

from __future__ import annotations

from phaseloop.engine.backends.base import Backend

_BEHIND = 2
"""Updates after which every process has made one: the second closes by what all told after it.

On a GPU the host of this process may have queued its first update while another still compiles.
"""


class Patience:
    """How far this process is.

    Args:
        backend: of several processes; it begins patient.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._updates = 0
        self._tested: set[str] = set()

    def begin(self) -> None:
        """What comes is new: other data, another step."""
        self._updates = 0
        self._backend.patient(True)

    def updated(self) -> None:
        """An update was made."""
        self._updates += 1
        if self._updates == _BEHIND:
            self._backend.patient(False)

    def test_begins(self, name: str) -> None:
        """A test phase begins."""
        if name not in self._tested:
            self._backend.patient(True)

    def test_ends(self, name: str) -> None:
        """It is left."""
        self._tested.add(name)
        self._backend.patient(self._updates < _BEHIND)
