"""What a replay has found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

Sample = int | str
"""Index in the dataset; of a mix, ``SOURCE/INDEX``."""


@dataclass
class Event:
    """An operation whose result was not finite, where what it was given does not explain it.

    Attributes:
        kind: ``made``: all it was given was finite; ``nan``: a NaN out of infinities; ``read``:
            data, a parameter or a state that was not finite, which ``source`` names.
        stage: ``forward``, ``loss``, ``backward`` or ``update``.
        module: name of the innermost module at work, empty for the model itself; None: none was.
        module_class: its class.
        operation: such as ``aten.log.default``; in backward with the node of the graph. Empty:
            the module's result was not finite, and no operation of torch was seen to make it so.
        shapes: of what it was given and what it gave.
        result: how many elements are not finite.
        parameters: that it read or moved.
        source: of ``read``.
        line: of user code, where there is one; in backward that of the forward operation.
        micro_batch: number within the window, from 1.
        rows: of its result that are not finite, where it has one for each sample.
    """

    kind: str
    stage: str
    module: str | None
    module_class: str
    operation: str
    shapes: str
    result: str
    parameters: list[str] = field(default_factory=list)
    source: str = ""
    line: str = ""
    micro_batch: int = 0
    rows: list[int] | None = None

    @property
    def place(self) -> str:
        """Where it was."""
        if self.module is None:
            return {"loss": "the criterion", "update": "the optimizer"}.get(
                self.stage, "the train step"
            )
        name = self.module if self.module else "(the model itself)"
        return f"module {name} ({self.module_class})"


@dataclass
class BadData:
    """Part of a micro-batch that is not finite as it comes from the data.

    Attributes:
        path: where in the batch: ``input``, ``target``, or a path in its tree.
        micro_batch: number within the window, from 1.
        samples: those that are not finite.
        result: how many elements.
    """

    path: str
    micro_batch: int
    samples: list[Sample]
    result: str


@dataclass
class Fault:
    """Why the update is not finite.

    Attributes:
        what: what of it is not finite, in words.
        first: the first operation; None: none was seen.
        then: others after it, in order.
        parameter: the first that is concerned: read or moved by the operation, or else the first
            whose gradient was not finite; empty: none.
        samples: behind it.
        samples_are: how they are known.
        micro_batch: number of theirs within the window, from 1.
        data: what was not finite before anything was computed.
        before: parameters, buffers and states of optimizers that were not finite before the update.
        gradients: parameters whose gradients were not finite, in the order they came.
        weights: parameters that were not finite after it.
        earlier: an earlier update, among those replayed, that was the first not to be finite.
    """

    what: list[str]
    first: Event | None = None
    then: list[Event] = field(default_factory=list)
    parameter: str = ""
    samples: list[Sample] = field(default_factory=list)
    samples_are: str = ""
    micro_batch: int = 0
    data: list[BadData] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    earlier: int | None = None


@dataclass
class Line:
    """One update that was run again.

    Attributes:
        update, epoch: its number, and its epoch's.
        loss: mean over its batch; None: the step reports none.
        measured: everything that was recorded at it, the loss included.
        rates: learning rate by optimizer and group.
        gradient_norm: over all gradients, before clipping.
        finite: loss and parameters after it are.
        seconds: in all, its data included.
    """

    update: int
    epoch: int
    loss: float | None
    measured: dict[str, float]
    rates: dict[str, float]
    gradient_norm: float
    finite: bool
    seconds: float


@dataclass
class Replay:
    """One update of a run, run again.

    Attributes:
        folder: of the run.
        update: which.
        start: the checkpoint that the replay began at; empty: the beginning of the run.
        passed_over: damaged checkpoints that would have been nearer, with what is wrong.
        configuration: where it was taken from.
        rolled_back: what the run's log says of its roll-backs on the way.
        lines: with ``until``: every update of the range.
        logged: rows of the run's log that were compared.
        differs: the first difference to a row of the log; empty: none.
        same_when_watched: loss and weights have the same bits whether the update is watched or
            not; None: it did not come to an end.
        batch: position of its batch in the epoch, and the epoch's batches.
        micro_batches: the samples of each.
        line: what it came to; None: it did not come to an end.
        gradients: norm of each parameter's, before clipping.
        parameters: norm of each before the update and after it.
        seconds: by part, in a run of the update in which nothing is watched.
        cold: it was the first update of its process, which takes longer.
        skips: why windows before it, or it, were skipped.
        fault: None: all is finite.
        harmless: without a fault, the first operation whose result was not finite all the same.
        error: what the update raised, if it did.
    """

    folder: str
    update: int
    start: str = ""
    passed_over: list[str] = field(default_factory=list)
    configuration: str = ""
    rolled_back: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    logged: int = 0
    differs: str = ""
    same_when_watched: bool | None = None
    batch: tuple[int, int | None] = (0, 0)
    micro_batches: list[list[Sample]] = field(default_factory=list)
    line: Line | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cold: bool = False
    skips: list[str] = field(default_factory=list)
    fault: Fault | None = None
    harmless: Event | None = None
    error: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it: numbers that are not finite are strings."""
        found: dict[str, Any] = _plain(dataclasses.asdict(self))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
