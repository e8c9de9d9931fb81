"""What a replay has found, and the words for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 10

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
    lines: list[Line] = field(default_factory=list)
    logged: int = 0
    differs: str = ""
    same_when_watched: bool | None = None
    batch: tuple[int, int] = (0, 0)
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

    def text(self) -> str:
        """The report."""
        rows = [*self._start(), *self._lines()]
        if self.micro_batches or not self.lines:
            rows += [*self._update(), *self._norms(), *self._seconds(), *self._verdict()]
        elif all(line.finite for line in self.lines):
            rows.append(("verdict", "loss and parameters are finite in all of them"))
        # Parameters may have long names.
        width = max(len(name) for name, _ in rows if not name.startswith(" ")) + 2
        return "\n".join(f"{name:<{width - 1}} {value}".rstrip() for name, value in rows)

    def _start(self) -> Iterable[tuple[str, str]]:
        yield "run", self.folder
        yield "from", self.start or "the beginning"
        for problem in self.passed_over:
            yield "passed over", problem
        yield "configuration", self.configuration
        if self.differs:
            yield "the same", f"no: {self.differs}"
        elif self.logged:
            rows = "row" if self.logged == 1 else "rows"
            yield "the same", f"as the run, to the bit: {self.logged} {rows} of its log compared"
        else:
            yield "the same", "not known: no row of the run's log lies between"

    def _lines(self) -> Iterable[tuple[str, str]]:
        for line in self.lines:
            norm = f"gradient norm {line.gradient_norm:.6g}"
            bad = "" if line.finite else "  NOT FINITE"
            yield (
                f"update {line.update}",
                f"epoch {line.epoch}  loss {_number(line.loss)}  {norm}  "
                f"lr {_rates(line.rates)}  {1000 * line.seconds:.1f} ms{bad}",
            )

    def _update(self) -> Iterable[tuple[str, str]]:
        line = self.line
        epoch = f"epoch {line.epoch}, " if line else ""
        yield "update", f"{self.update} ({epoch}batch {self.batch[0]} of {self.batch[1]})"
        for number, samples in enumerate(self.micro_batches, 1):
            name = "samples" if len(self.micro_batches) == 1 else f"samples {number}"
            yield name, ", ".join(map(str, samples))
        for skip in self.skips:
            yield "skipped", skip
        if line is not None:
            yield "lr", _rates(line.rates)
            for name, value in line.measured.items():
                yield name, _number(value)
        if self.error:
            yield "error", self.error
        if self.same_when_watched is not None:
            yield (
                "watched",
                (
                    "the same bits as when nothing is watched"
                    if self.same_when_watched
                    else "NOT the same bits as when nothing is watched"
                ),
            )

    def _norms(self) -> Iterable[tuple[str, str]]:
        if self.line is not None:
            yield "gradient norm", f"{self.line.gradient_norm:.6g}, before clipping"
        largest = sorted(self.gradients, key=lambda n: -_sortable(self.gradients[n]))[:_SHOWN]
        for name in largest:
            yield f"  {name}", f"{self.gradients[name]:.6g}"
        largest = sorted(self.parameters, key=lambda n: -_sortable(self.parameters[n][1]))[:_SHOWN]
        if largest:
            yield "parameter norm", "before -> after"
        for name in largest:
            before, after = self.parameters[name]
            yield f"  {name}", f"{before:.6g} -> {after:.6g}"

    def _seconds(self) -> Iterable[tuple[str, str]]:
        if self.seconds:
            parts = "  ".join(f"{name} {1000 * s:.2f}" for name, s in self.seconds.items())
            cold = "; the first update of this process, which takes longer" if self.cold else ""
            yield "milliseconds", f"{parts}{cold}"

    def _verdict(self) -> Iterable[tuple[str, str]]:
        fault = self.fault
        if fault is None:
            if not self.error:
                yield "verdict", "loss, gradients and parameters are finite"
            if self.harmless is not None:
                yield "without harm", told(self.harmless)
            return
        yield "not finite", "; ".join(fault.what)
        if fault.before:
            yield "before it", f"not finite already: {_some(fault.before)}"
        if fault.earlier is not None:
            yield "", f"the first update to go wrong is {fault.earlier}: say update={fault.earlier}"
        for bad in fault.data:
            where = f"in {bad.path} of micro-batch {bad.micro_batch}: {bad.result}"
            yield "data", f"{where}, of {_samples(bad.samples)}"
        if fault.first is not None:
            yield "first", told(fault.first)
            if fault.first.line:
                yield "line", fault.first.line
        for event in fault.then:
            yield "then", told(event)
        if fault.parameter:
            yield "parameter", fault.parameter
        if fault.samples:
            yield "behind it", f"{_samples(fault.samples)} ({fault.samples_are})"
        if fault.gradients:
            yield "gradients", f"not finite, in the order they came: {_some(fault.gradients)}"
        if fault.weights:
            yield "weights", f"not finite after it: {_some(fault.weights)}"


def told(event: Event) -> str:
    """An event in words."""
    operation = event.operation or "its result"
    gave = f"gave {event.result}" if event.operation else f"has {event.result}"
    where = f"in the {event.stage} of micro-batch {event.micro_batch}"
    if event.stage == "update":
        where = "in the optimizer's step"
    out_of = {"nan": ", out of infinities", "read": f", read from {event.source}"}
    shapes = f" ({event.shapes})" if event.shapes else ""
    return f"{event.place}: {operation}{shapes} {gave}{out_of.get(event.kind, '')}, {where}"


def _rates(rates: Mapping[str, float]) -> str:
    if len(rates) == 1:
        return f"{next(iter(rates.values())):.6g}"
    return ", ".join(f"{name} {value:.6g}" for name, value in rates.items())


def _number(value: float | None) -> str:
    return "not reported" if value is None else repr(value)


def _samples(samples: list[Sample]) -> str:
    word = "sample" if len(samples) == 1 else "samples"
    return f"{word} {', '.join(map(str, samples))}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
