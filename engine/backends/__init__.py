"""Backends: one file per way to run. Nothing outside this folder knows which one is in use."""

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.backends.ddp import Ddp
from phaseloop.engine.backends.fsdp import Fsdp
from phaseloop.engine.backends.horovod import Horovod
from phaseloop.engine.backends.single import Single
from phaseloop.engine.backends.xla import Xla

__all__ = ["Backend", "Ddp", "Fsdp", "Horovod", "Single", "Xla"]
