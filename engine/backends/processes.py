"""Processes: what every backend of several processes shares: how they meet, and wait."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from phaseloop.engine.backends import joining
from phaseloop.engine.backends.collectives import Collectives
from phaseloop.engine.backends.devices import OnDevice, choose
from phaseloop.engine.backends.host import Gone, Host, HostGroup, let_go
from phaseloop.engine.backends.joining import Joining
from phaseloop.engine.backends.sockets import Sockets, disconnect, make_room, open_here
from phaseloop.engine.backends.waiting import explained
from phaseloop.engine.errors import ConfigError, PhaseloopError

log = logging.getLogger("phaseloop")

_TO_EXIT = 5.0
"""Seconds that the exit of a process takes at most which has failed."""

_LONG = {True: 10.0, False: 30.0}
"""Seconds after which the primary, and another, says that it waits for others at the start."""


class Processes(Collectives, OnDevice):
    """Several processes, each with its own device; the base of their backends.

    Without a launcher (see :mod:`joining`) it is a world of one process, without any group.

    Args:
        device: ``auto`` (a GPU of its own for each process, where there are some), ``cpu`` or
            ``cuda``.
        timeout: seconds that a collective may take; a process that waits longer ends with an
            error.
        start_timeout: the same for the first updates and tests, which may compile and fill
            caches; see :class:`~phaseloop.engine.patience.Patience`.

    Raises:
        ConfigError: the device is none of these, a time is not positive, or there are fewer GPUs
            on this machine than processes.
    """

    def __init__(
        self, device: str = "auto", timeout: float = 300.0, start_timeout: float = 1800.0
    ) -> None:
        super().__init__()
        for name, value in (("timeout", timeout), ("start_timeout", start_timeout)):
            if value <= 0:
                raise ConfigError(f"backend.{name}", f"{value} s is no time; give more than 0")
        self.timeout = timeout
        self.start_timeout = start_timeout
        joined = joining.found()
        if joined is not None:
            self._check_launcher(joined)
            self.rank, self.world_size = joined.rank, joined.world_size
        self.device = self._choose(device, joined)
        self._meeting: Store | None = None
        self._joined = False
        self._opened: Sockets = set()
        self._failed = False
        self._exiting = threading.Event()
        self._patient = True

    def _check_launcher(self, joined: Joining) -> None:
        """Raises ConfigError where these processes could not find one another."""
        if joined.by == joining.HOROVODRUN:
            raise ConfigError(
                "backend.name", "horovodrun started this process: use backend=horovod, or auto"
            )

    def _choose(self, device: str, joined: Joining | None) -> torch.device:
        """The device that the option means."""
        return choose(device, None if joined is None else _number(joined))

    # --- joining and leaving ---

    def setup(self) -> None:
        super().setup()
        if self.world_size == 1 or self._joined:
            return
        with self._waiting():
            make_room(self.world_size)
            self._meeting = store = self._meet()
            before = open_here()
            self._join(store)
            self.host = self._talk(store)
            self._opened = open_here() - before
        self._joined = True  # last: what has failed on the way is tried again, and fails again

    def _meet(self) -> Store:
        """Where the processes find one another: a store that no earlier training has used."""
        return _meeting_place(self.rank, self.world_size, timedelta(seconds=self.start_timeout))

    def _join(self, store: Store) -> None:
        """What else is to be joined, for tensors on the device."""

    def _talk(self, store: Store) -> Host:
        """How they speak to one another on the host."""
        return HostGroup(PrefixStore("host", store), self.rank, self.world_size, self.start_timeout)

    def _connections(self) -> Sockets:
        """With the others, beside those that were opened when this one joined."""
        return set()

    def _limit(self, seconds: float) -> None:
        """What was joined may take no longer for a collective from here on."""

    def _leave(self) -> None:
        """What was joined is left; this process has not failed, and hears the others to the end."""

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """While the others are waited for; where that takes long, it is said, and for whom."""
        timer = threading.Timer(_LONG[self.primary], self._tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self) -> None:
        joined = joining.found()
        assert joined is not None
        text = (
            f"rank {self.rank} waits for all {self.world_size} processes that {joined.by} started, "
            f"{self._where()}, {self.start_timeout:g} s at most (backend.start_timeout); a "
            f"process on its own is backend=single"
        )
        if self.primary:
            log.warning(text)
        else:  # has no folder yet to log in, and no console of its own
            print(text, file=sys.stderr, flush=True)

    def _where(self) -> str:
        """The place that they meet at."""
        return f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

    def patient(self, on: bool) -> None:
        """Collectives from here on may take ``start_timeout``, or no longer than ``timeout``."""
        if self._meeting is None or self._failed or on == self._patient:
            return
        self._patient = on
        seconds = self.start_timeout if on else self.timeout
        self.host.limit(seconds)
        self._limit(seconds)

    def failed(self, error: BaseException) -> None:
        """This process is on its way out with an error: it enters no collective any more."""
        if self.world_size > 1 and not self._failed:
            self._failed = True
            self.host = Gone(self.host)
            # Now, since at its exit an interpreter begins no thread any more.
            threading.Thread(target=self._end, args=[error], daemon=True).start()
            # Last registered runs first: before Horovod leaves in order, which waits as well.
            atexit.register(self._exit)

    def _exit(self) -> None:
        """This process has failed and exits: it waits for nobody, whatever is under way.

        Gloo, which has no other way, would: for what the others may never come to. Not before the
        exit: with it the others end, too.
        """
        if connections := self._opened | self._connections():
            self._exiting.set()
            disconnect(connections)
        let_go()

    def _end(self, error: BaseException) -> None:
        """What does not heed that its connections are gone is not waited for."""
        self._exiting.wait()
        time.sleep(_TO_EXIT)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)

    def waited_in_vain(self, error: BaseException) -> str:
        if self._meeting is None or isinstance(error, PhaseloopError):
            return ""
        return explained(error, self._meeting, self.rank, self.world_size)

    def teardown(self) -> None:
        joined, self._joined, self._meeting = self._joined, False, None
        if not joined or self._failed:
            return  # others may hang in a collective, and leaving in order would wait for them
        try:
            self._leave()
        finally:
            self.host = Host()


def _number(joined: Joining) -> int:
    """Of this process among those that share its machine's GPUs."""
    # With --gpus-per-task each task sees its own GPU alone, and calls it 0.
    alone = joined.by == "slurm" and torch.cuda.device_count() == 1
    return 0 if alone else joined.local_rank


stores: list[Store] = []
"""The launcher's, once it was found."""

_trainings = itertools.count()


def _meeting_place(rank: int, world_size: int, patience: timedelta) -> Store:
    """A part of the launcher's store that no earlier training of these processes has used.

    What that left there, torch would take for addresses of now.
    """
    if not stores:
        found = dist.rendezvous("env://", rank, world_size, timeout=patience)
        stores.append(next(iter(found))[0])
    # Torch's agent keeps its store over restarts, and in it the addresses of those that have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"phaseloop/{attempt}/{next(_trainings)}", stores[0])
