"""Hearing: what launchers on several machines tell one another, above all of failures."""

from __future__ import annotations

import json
import socket
import time

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import WorkerGroup

from phaseloop.engine.outcomes import Outcome

_CAUSE, _HEARD = "phaseloop/cause", "phaseloop/heard"
_SAID = "phaseloop/said"
_TO_HEAR = 10.0  # seconds in which a machine hears the cause from that on which it was
_LOOK = 0.1  # seconds between two looks


def machines(group: WorkerGroup) -> int:
    """How many there are."""
    return group.group_world_size or 1


def is_known(group: WorkerGroup) -> bool:
    """Another machine has said that its processes have failed."""
    if group.store is None or machines(group) == 1:
        return False
    try:
        return bool(group.store.check([_CAUSE]))
    except RuntimeError:
        return False  # the machine that held the store is gone; the agent will say so


def first_said(store: Store, value: str) -> str:
    """The value of the machine that said its own first, since the processes were last started."""
    return str(store.compare_set(_SAID, "", value).decode())


def shared(store: Store, count: int, cause: Outcome, text: str) -> tuple[Outcome, str]:
    """The cause, from the machine that it was on; that stays until the others have heard it."""
    until = time.monotonic() + _TO_HEAR
    try:
        if not cause.lost:
            about = {"code": cause.code, "text": f"on {socket.gethostname()}: {text}"}
            store.set(_CAUSE, json.dumps(about))
            while store.add(_HEARD, 0) < count - 1 and time.monotonic() < until:
                time.sleep(_LOOK)
            return cause, text
        while time.monotonic() < until:
            if store.check([_CAUSE]):
                found = json.loads(store.get(_CAUSE))
                store.add(_HEARD, 1)
                return Outcome(found["code"], lost=True), found["text"]
            time.sleep(_LOOK)
    except RuntimeError:
        pass  # the machine that held the store is gone
    return cause, text
