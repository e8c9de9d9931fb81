"""A server that falls silent: an error after some time, instead of waiting for ever."""

from __future__ import annotations

from typing import Any


def end_waiting(system: Any) -> None:
    """See to it that the time limits of a file system hold in all that is asked.

    botocore announces what it sends (``Expect: 100-continue``) and aiohttp waits for the permission
    without a limit; ``read_timeout`` begins only afterwards. A server, or a line, that accepts and
    then says nothing would hold a save up for ever. So nothing is announced.

    Args:
        system: of fsspec; only one of s3fs is changed.
    """
    if "s3" not in system.protocol:
        return
    from botocore.handlers import add_expect_header

    system.connect()
    system.s3.meta.events.unregister("before-call.s3", add_expect_header)
