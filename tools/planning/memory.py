"""The memory estimate: what one process will hold on its device while it trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phaseloop.engine.events import Hook
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.report import counted
from phaseloop.engine.shards import local
from phaseloop.engine.task import Task
from phaseloop.tools.planning.optimizer_state import state_bytes
from phaseloop.tools.planning.rehearsal import rehearse

_HALF = (torch.float16, torch.bfloat16)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

ALWAYS_UNKNOWN = (
    "what operations need while they compute, and the gradients of activations",
    "what the allocator rounds up or holds back, and the device's own context",
    "batches that wait: the next one, and those of worker processes",
)


@dataclass(frozen=True)
class Part:
    """One thing that takes memory.

    Attributes:
        name: what it is.
        bytes: how much.
        note: how it comes about.
    """

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Memory:
    """What one process holds.

    Attributes:
        parts: what is known, those that are not empty.
        unknown: what is not in them, in words.
        processes: how many there are, each with as much.
        device: where.
    """

    parts: list[Part]
    unknown: list[str]
    processes: int
    device: str

    @property
    def total(self) -> int:
        """Bytes of all that is known."""
        return sum(part.bytes for part in self.parts)

    def lines(self) -> list[str]:
        """The estimate as printed."""
        each = f", on each of {self.processes} processes" if self.processes > 1 else ""
        width = max((len(part.name) for part in self.parts), default=0)
        lines = [f"memory      at least {size(self.total)}{each}"]
        lines += [
            f"  {p.name:<{width}}  {size(p.bytes):>10}  {p.note}".rstrip() for p in self.parts
        ]
        return [*lines, *(f"  not known: {text}" for text in self.unknown)]


def size(count: float) -> str:
    """``512 bytes``, ``1.5 MiB``."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    digits = ",.0f" if not power or count >= 1000 else ".3g"
    return f"{count:{digits}} {_UNITS[power]}"


def estimate(task: Task, hooks: Mapping[str, Hook], processes: int = 1) -> Memory:
    """What one process of the run will hold, in its first stage.

    Args:
        task: after ``build()``; left as it is.
        processes: that the run will have.
    """
    there = _Share(task, processes)
    modules = [task.bare_model, task.criterion_module]
    parameters = _once(p for m in modules if isinstance(m, nn.Module) for p in m.parameters())
    buffers = _once(b for m in modules if isinstance(m, nn.Module) for b in m.buffers())
    trained = [p for p in task.trainable if p.requires_grad]
    gradients = sum(map(there.bytes, trained))
    parts = [
        Part("parameters", sum(map(there.bytes, parameters)), there.note(parameters)),
        Part("buffers", sum(map(there.bytes, buffers))),
        Part("gradients", gradients, there.note(trained)),
    ]
    unknown = []
    if there.processes > 1 and task.backend.gradients_twice:
        parts.append(Part("messages", gradients, "the gradients once more, as they are sent"))
    for name, optimizer in task.optimizers.items():
        state = state_bytes(optimizer, there.shape)
        label = "optimizer" if len(task.optimizers) == 1 else f"optimizer {name}"
        if state is None:
            unknown.append(f"{label}: what {type(optimizer).__name__} keeps")
        else:
            parts.append(Part(label, state, f"what {type(optimizer).__name__} keeps"))
    for name, hook in hooks.items():
        held = sum(there.bytes(t, widen=True) for t in _once(hook.holds(task)))
        parts.append(Part(f"hook {name}", held, "a copy of what it averages" if held else ""))
    parts += _of_a_micro_batch(task, there.processes, unknown)
    unknown += _unknown(task, there)
    return Memory([p for p in parts if p.bytes], unknown, there.processes, task.device.type)


def micro_batch(task: Task, processes: int) -> int:
    """Samples of the largest micro-batch of a process; 0: nothing is trained."""
    if TRAIN not in task.loaders:
        return 0
    sizes = []
    for plan in task.loaders[TRAIN].plans.values():
        planned = dataclasses.replace(plan, world_size=processes, rank=0)
        sizes.append(max(piece.weight for piece in planned.window(0).pieces))
    return max(sizes)


def _of_a_micro_batch(task: Task, processes: int, unknown: list[str]) -> list[Part]:
    done = rehearse(task, micro_batch(task, processes))
    if done.problem:
        unknown.append(f"what is kept for backward: {done.problem}")
        return []
    samples = counted(done.samples, "sample")
    return [
        Part("micro-batch", done.batch, f"the first: {samples}"),
        Part("kept for backward", done.kept, f"of that, in {task.precision.name}"),
    ]


def _unknown(task: Task, there: _Share) -> list[str]:
    found = list(ALWAYS_UNKNOWN)
    if there.cuts:
        found.append("the parts of the model that are whole while they compute")
    if task.model_options.compile:
        found.append("what compilation leaves out of it: measured is the model as written")
    if task.stages.several:
        found.append("later stages, where they train more of the model or other batches")
    if there.processes > 1 and not task.backend.gradients_twice:
        found.append("what is sent to other processes while it is on its way")
    return found


class _Share:
    """What one process has of each tensor: all of it, or its shard.

    Attributes:
        processes: of the run.
        cuts: parameters are in shards.
    """

    def __init__(self, task: Task, processes: int) -> None:
        self.processes = max(processes, task.backend.world_size)
        self.cuts = task.backend.cuts_model and self.processes > 1
        # The processes of a plan are fewer where the run itself would start them.
        self._cut = self.processes if self.cuts and task.backend.world_size == 1 else 1

    def shape(self, tensor: Tensor) -> Sequence[int]:
        own = local(tensor).shape
        is_parameter = isinstance(tensor, nn.Parameter)
        if self._cut == 1 or not own or not is_parameter:
            return own
        return (math.ceil(own[0] / self._cut), *own[1:])

    def bytes(self, tensor: Tensor, widen: bool = False) -> int:
        each = 4 if widen and tensor.dtype in _HALF else tensor.element_size()
        return math.prod(self.shape(tensor)) * each

    def note(self, tensors: Sequence[Tensor]) -> str:
        count = sum(math.prod(self.shape(tensor)) for tensor in tensors)
        return f"{count:,} numbers" + (", a shard of each" if self.cuts else "")


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
