"""Two processes that Horovod joins make the updates of one: the cases of backend ``ddp``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import test_ddp
from tests.engine.test_ddp import (  # noqa: F401
    test_sequences_that_differ_in_length_between_processes,
    test_two_processes_make_the_updates_of_one,
)


@pytest.fixture(autouse=True, scope="module")
def found_anew() -> Iterator[None]:
    """What was found with ``ddp`` in this session is none of these tests' affair."""
    kept = dict(test_ddp._found)
    test_ddp._found.clear()
    yield
    test_ddp._found.clear()
    test_ddp._found.update(kept)
