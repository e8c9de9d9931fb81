"""The words for what a replay has found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from phaseloop.tools.replaying.found import Event, Replay, Sample

_SHOWN = 10


def report(found: Replay) -> str:
    """The report of a replay."""
    rows = [*_start(found), *_lines(found)]
    if found.micro_batches or not found.lines:
        rows += [*_update(found), *_norms(found), *_seconds(found), *_verdict(found)]
    elif all(line.finite for line in found.lines):
        rows.append(("verdict", "loss and parameters are finite in all of them"))
    # Parameters may have long names.
    width = max(len(name) for name, _ in rows if not name.startswith(" ")) + 2
    return "\n".join(f"{name:<{width - 1}} {value}".rstrip() for name, value in rows)


def _start(found: Replay) -> Iterable[tuple[str, str]]:
    yield "run", found.folder
    yield "from", found.start or "the beginning"
    for problem in found.passed_over:
        yield "passed over", problem
    yield "configuration", found.configuration
    for told_of in found.rolled_back:
        yield "rolled back", told_of
    if found.differs:
        yield "the same", f"no: {found.differs}"
    elif found.logged:
        rows = "row" if found.logged == 1 else "rows"
        yield "the same", f"as the run, to the bit: {found.logged} {rows} of its log compared"
    else:
        yield "the same", "not known: no row of the run's log lies between"


def _lines(found: Replay) -> Iterable[tuple[str, str]]:
    for line in found.lines:
        norm = f"gradient norm {line.gradient_norm:.6g}"
        bad = "" if line.finite else "  NOT FINITE"
        yield (
            f"update {line.update}",
            f"epoch {line.epoch}  loss {_number(line.loss)}  {norm}  "
            f"lr {_rates(line.rates)}  {1000 * line.seconds:.1f} ms{bad}",
        )


def _update(found: Replay) -> Iterable[tuple[str, str]]:
    line = found.line
    epoch = f"epoch {line.epoch}, " if line else ""
    of = "" if found.batch[1] is None else f" of {found.batch[1]}"
    yield "update", f"{found.update} ({epoch}batch {found.batch[0]}{of})"
    for number, samples in enumerate(found.micro_batches, 1):
        name = "samples" if len(found.micro_batches) == 1 else f"samples {number}"
        yield name, ", ".join(map(str, samples))
    for skip in found.skips:
        yield "skipped", skip
    if line is not None:
        yield "lr", _rates(line.rates)
        for name, value in line.measured.items():
            yield name, _number(value)
    if found.error:
        yield "error", found.error
    if found.same_when_watched is not None:
        yield (
            "watched",
            (
                "the same bits as when nothing is watched"
                if found.same_when_watched
                else "NOT the same bits as when nothing is watched"
            ),
        )


def _norms(found: Replay) -> Iterable[tuple[str, str]]:
    if found.line is not None:
        yield "gradient norm", f"{found.line.gradient_norm:.6g}, before clipping"
    largest = sorted(found.gradients, key=lambda n: -_sortable(found.gradients[n]))[:_SHOWN]
    for name in largest:
        yield f"  {name}", f"{found.gradients[name]:.6g}"
    largest = sorted(found.parameters, key=lambda n: -_sortable(found.parameters[n][1]))[:_SHOWN]
    if largest:
        yield "parameter norm", "before -> after"
    for name in largest:
        before, after = found.parameters[name]
        yield f"  {name}", f"{before:.6g} -> {after:.6g}"


def _seconds(found: Replay) -> Iterable[tuple[str, str]]:
    if found.seconds:
        parts = "  ".join(f"{name} {1000 * s:.2f}" for name, s in found.seconds.items())
        cold = "; the first update of this process, which takes longer" if found.cold else ""
        yield "milliseconds", f"{parts}{cold}"


def _verdict(found: Replay) -> Iterable[tuple[str, str]]:
    fault = found.fault
    if fault is None:
        if not found.error:
            yield "verdict", "loss, gradients and parameters are finite"
        if found.harmless is not None:
            yield "without harm", told(found.harmless)
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
