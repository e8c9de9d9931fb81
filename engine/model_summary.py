"""Model summary: parameters and FLOPs of a model, module by module."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phaseloop.engine import rng
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.mix import Mix
from phaseloop.engine.data.reader import Reader, Request
from phaseloop.engine.data.stream_reader import is_stream
from phaseloop.engine.data.transfer import to_device
from phaseloop.engine.errors import DataError
from phaseloop.engine.report import aligned, counted
from phaseloop.engine.shards import class_name, is_shard

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        name: dotted name in the model; empty: the model itself.
        kind: its class.
        parameters: elements of its parameters, its children's included, shared ones once.
        trainable: how many of them have ``requires_grad``.
        flops: operations of one sample's forward pass in it and its children, a multiplication
            and an addition together as one; None: not counted.
    """

    name: str
    kind: str
    parameters: int
    trainable: int
    flops: int | None


@dataclass(frozen=True)
class Summary:
    """A model in numbers.

    Attributes:
        rows: the modules in order, the model itself first.
        uncounted: operation to the number of its calls that the FLOPs leave out.
        problem: why there are no FLOPs; empty: there are.
    """

    rows: list[Row]
    uncounted: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def total(self) -> Row:
        """The whole model."""
        return self.rows[0]

    def lines(self) -> list[str]:
        """The summary as an aligned table, and below it what was not counted."""
        cells = [("module", "type", "parameters", "trainable", "FLOPs per sample")] + [
            (
                "  " * (row.name.count(".") + 1) + row.name if row.name else "model",
                row.kind,
                f"{row.parameters:,}",
                f"{row.trainable:,}",
                "-" if row.flops is None else f"{row.flops:,}",
            )
            for row in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in cells)
        ]
        return lines + self.remarks()

    def remarks(self) -> list[str]:
        """What was not counted, and why."""
        return aligned(self._remarks())

    def _remarks(self) -> Iterator[tuple[str, str]]:
        if self.problem:
            yield "FLOPs not counted", self.problem
        if self.uncounted:
            calls = counted(sum(self.uncounted.values()), "operation")
            names = ", ".join(f"{name} {n:,}" for name, n in sorted(self.uncounted.items()))
            yield "not in the FLOPs", f"{calls}: {names}"


def summarize_task(task: Task, depth: int = 2) -> Summary:
    """Summary of a built task's model, with the first sample of its data as input.

    Nothing of the training notices: the model is counted in a copy that shares its parameters,
    and the generators of this process and its device are put back.

    Args:
        task: after ``build()``.
        depth: levels of modules below the model.
    """
    host, device = rng.HostGenerators(), task.backend.rng_state()
    try:
        lazy = task.backend.lazy  # what such a device makes of operations, nobody counts
        value = task.precision.cast_input(first_input(task, CPU if lazy else task.device))
    except Exception as error:
        rows = _rows(task.bare_model, depth, None)
        return Summary(rows, problem=f"no sample could be read: {_describe(error)}")
    else:
        model = _on_host(task) if lazy else task.bare_model
        return summarize(model, value, depth)
    finally:
        host.put_back()
        task.backend.set_rng_state(device)


def summarize(model: nn.Module, value: Any, depth: int = 2) -> Summary:
    """Parameters and FLOPs by module, counted by fvcore on one forward pass in evaluation mode.

    Args:
        model: left as it is, its hooks, buffers and train flags included.
        value: the input, a batch of one sample on the model's device.
        depth: levels of modules below the model.
    """
    if any(map(is_shard, model.parameters())):  # a pass is for all processes, and a copy for none
        return Summary(_rows(model, depth, None), problem="the parameters are sharded")
    # fvcore leaves its hooks on the model when the pass fails; so it gets a copy.
    try:
        flops, uncounted = _count(twin(model).eval(), value)
    except Exception as error:
        return Summary(_rows(model, depth, None), problem=_describe(error))
    return Summary(_rows(model, depth, flops), uncounted)


def first_input(task: Task, device: torch.device) -> Any:
    """The model's input for the first sample of the training data, or of the first test set.

    A batch of one, on the device. Seeds the host's generators; the caller puts them back.

    Raises:
        Whatever the dataset or the collate function raises.
    """
    data = task.train_data or next(iter(task.test_data.values()))
    if is_stream(data.first):
        raise DataError("a stream is read by the training alone")
    seed = rng.mix(task.seed, rng.SAMPLE_TEST)
    sources = torch.tensor([0]) if isinstance(data.first, Mix) else None
    request = Request(torch.tensor([0]), seed, None, 1, sources)
    batch = Reader(data.first, data.collate)[request]
    move = data.to_device or to_device
    return Batch(move(batch, device), request.indices, 1).input


def _on_host(task: Task) -> nn.Module:
    """A copy of the model on the CPU; nothing is computed on the device for it."""
    model = task.bare_model
    there = [*model.parameters(), *model.buffers()]
    values = task.backend.to_host([tensor.detach() for tensor in there])
    copies: dict[int, Any] = {}
    for tensor, value in zip(there, values, strict=True):
        trained = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if trained else value
    return copy.deepcopy(model, copies)


def twin(model: nn.Module) -> nn.Module:
    """A copy of all but the parameters, which both use."""
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    for module in model.modules():  # results kept from an earlier pass, as weight norm does
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                shared[id(value)] = value.detach()
    return copy.deepcopy(model, shared)


def _count(model: nn.Module, value: Any) -> tuple[dict[str, int], dict[str, int]]:
    """FLOPs by module name, and the calls of operations that are not in them."""
    with _silence(), torch.no_grad():
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(model, (value,))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        flops = {name: int(count) for name, count in analysis.by_module().items()}
        return flops, dict(analysis.unsupported_ops())


@contextmanager
def _silence() -> Iterator[None]:
    """Without the warnings of torch's tracer and of fvcore's import."""
    logger = logging.getLogger("fvcore")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _rows(model: nn.Module, depth: int, flops: dict[str, int] | None) -> list[Row]:
    rows = []
    for name, module in model.named_modules():
        if name and name.count(".") >= depth:
            continue
        parameters = list(module.parameters())
        rows.append(
            Row(
                name,
                class_name(module),
                sum(p.numel() for p in parameters),
                sum(p.numel() for p in parameters if p.requires_grad),
                None if flops is None else flops.get(name, 0),
            )
        )
    return rows


def _describe(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"
