"""Every test here starts processes that Horovod joins: those of other folders are played again so.

They run in an environment of their own: ``make test-horovod``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs import ranks


@pytest.fixture(autouse=True, scope="package")
def by_horovod() -> Iterator[None]:
    """Processes that are started find one another by Horovod."""
    with ranks.horovod_instead():
        yield
