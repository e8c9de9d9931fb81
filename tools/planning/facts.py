"""The facts of a plan in words: phases, data, hooks and parameter groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phaseloop.engine import plan_report
from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.events import EVENTS, Dispatcher, Hook
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.report import by_epoch
from phaseloop.engine.task import Task

Fact = tuple[str, str]
"""What it is about, in a word, and the fact; without the word: it is about the same."""


def facts(task: Task) -> Iterator[Fact]:
    """What is trained and tested, on what, and where it is kept."""
    plan = task.plan
    if task.stages.several:
        yield from _stages(task)
    elif TRAIN in task.loaders:
        yield from _training(task)
    for name, loader in task.loaders.items():
        yield "data", f"{name}: {_size(loader)}"
    if plan.test_sets and not task.stages.several:
        cadence = plan_report.cadence(plan).removeprefix("test ")
        yield "testing", f"{cadence}, and after the last update" if cadence else "never"
    if options := task.model_options.describe():
        yield "model", ", ".join(options)
    if task.weights is not None:
        yield "weights", f"at the start from {task.weights.path}"
    yield "device", f"{task.backend.described()}, {task.backend.world_size} process"
    yield "folder", str(task.folder.path) if task.folder else "none: nothing is saved"


def calls(hooks: Mapping[str, Hook]) -> dict[str, list[str]]:
    """The names of the hooks that listen to each event, in the order they are called."""
    dispatcher = Dispatcher(hooks)
    return {event: names for event in EVENTS if (names := dispatcher.listeners(event))}


def group_lines(task: Task) -> Iterator[str]:
    """A line for each parameter group, where an optimizer has several."""
    for name, optimizer in task.optimizers.items():
        groups = optimizer.param_groups
        if len(groups) == 1:
            continue
        yield ""
        yield f"{name}, by parameter group" if len(task.optimizers) > 1 else "parameter groups"
        rows = [["", "parameters", "lr", "weight decay"]]
        for number, group in enumerate(groups):
            count = sum(parameter.numel() for parameter in group["params"])
            options = [group.get(option, "") for option in ("lr", "weight_decay")]
            shown = [f"{value:.6g}" if value != "" else "" for value in options]
            rows.append([str(group.get("name", number)), f"{count:,}", *shown])
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for label, *cells in rows:
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            yield f"  {label:<{widths[0]}}  {'  '.join(aligned)}"


def _training(task: Task) -> Iterator[Fact]:
    plan, loader = task.plan, task.loaders[TRAIN]
    if plan.known:
        lengths = by_epoch({first: int(cut.windows) for first, cut in loader.plans.items()})
        yield "training", f"{plan.epochs:g} epochs of {lengths} updates: {plan.updates} updates"
    else:
        yield "training", plan_report.length(plan)
    for first, cut in loader.plans.items():
        pieces = len(cut.window(0).pieces)
        since = f"from epoch {first}: " if len(loader.plans) > 1 else ""
        last = cut.window(int(cut.windows) - 1).samples if plan.known else "as it comes"
        plural = "es" if pieces > 1 else ""
        yield (
            "batch",
            f"{since}{cut.batch_size} samples, in {pieces} micro-batch{plural}; the last of an "
            f"epoch {last}",
        )


def _size(loader: AnyLoader) -> str:
    if not isinstance(loader.windows, int):
        return plan_report.samples(loader)
    batches = f"{loader.windows:,} batch{'' if loader.windows == 1 else 'es'}"
    return f"{plan_report.samples(loader)} in {batches}"


def _stages(task: Task) -> Iterator[Fact]:
    for number, plan in enumerate(task.stages.plans()):
        parts = (plan_report.length(plan), plan_report.cadence(plan))
        name = task.stages.label(number)
        yield "" if number else "stages", f"{name}: {', '.join(filter(None, parts))}"
    for number, (stage, loader) in enumerate(
        zip(task.stages.given, task.stages.loaders, strict=True)
    ):
        if loader is not None and stage.train is not None and number:
            yield "data", f"{task.stages.label(number)}: {_size(loader)}"
