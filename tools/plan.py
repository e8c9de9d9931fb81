"""``plan=true``: what a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phaseloop.engine import plan_report
from phaseloop.engine.config.build import Built
from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.events import EVENTS, Dispatcher
from phaseloop.engine.model_summary import summarize_task
from phaseloop.engine.phase_plan import PhasePlan
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.report import by_epoch
from phaseloop.engine.task import Task

_POINTS = 400  # more than a picture has pixels to show


def show_plan(built: Built, processes: int = 1) -> None:
    """Print phases, sizes, hooks, model and groups; draw the schedules to ``plan.png``.

    Args:
        processes: that the run itself would start; what is printed is one process's.
    """
    task = built.task
    task.build()
    model = summarize_task(task).lines()
    lines = [*_phase_lines(task), "", *_hook_lines(built), "", *model, *_group_lines(task)]
    if not task.primary:
        return
    for line in lines:
        print(line)
    if processes > task.backend.world_size:
        print(
            f"\nThe run starts {processes} processes, each with its share of every batch; what is "
            f"said of micro-batches here is as one process has them."
        )
    for line in _schedule_lines(task):
        print(line)


def _phase_lines(task: Task) -> Iterator[str]:
    plan = task.plan
    if task.stages.several:
        yield from _stage_lines(task)
    elif TRAIN in task.loaders:
        loader = task.loaders[TRAIN]
        if plan.known:
            lengths = by_epoch({first: int(cut.windows) for first, cut in loader.plans.items()})
            yield f"training    {plan.epochs:g} epochs of {lengths} updates: {plan.updates} updates"
        else:
            yield f"training    {plan_report.length(plan)}"
        for first, cut in loader.plans.items():
            pieces = len(cut.window(0).pieces)
            since = f"from epoch {first}: " if len(loader.plans) > 1 else ""
            last = cut.window(int(cut.windows) - 1).samples if plan.known else "as it comes"
            yield (
                f"batch       {since}{cut.batch_size} samples, in {pieces} micro-batch"
                f"{'es' if pieces > 1 else ''}; the last of an epoch "
                f"{last}"
            )
    for name, loader in task.loaders.items():
        yield f"data        {name}: {_size(loader)}"
    if plan.test_sets and not task.stages.several:
        cadence = plan_report.cadence(plan).removeprefix("test ")
        yield f"testing     {f'{cadence}, and after the last update' if cadence else 'never'}"
    if options := task.model_options.describe():
        yield f"model       {', '.join(options)}"
    if task.weights is not None:
        yield f"weights     at the start from {task.weights.path}"
    yield f"device      {task.backend.described()}, {task.backend.world_size} process"
    yield f"folder      {task.folder.path if task.folder else 'none: nothing is saved'}"


def _size(loader: AnyLoader) -> str:
    if not isinstance(loader.windows, int):
        return plan_report.samples(loader)
    batches = f"{loader.windows:,} batch{'' if loader.windows == 1 else 'es'}"
    return f"{plan_report.samples(loader)} in {batches}"


def _stage_lines(task: Task) -> Iterator[str]:
    for number, plan in enumerate(task.stages.plans()):
        facts = (plan_report.length(plan), plan_report.cadence(plan))
        name = task.stages.label(number)
        yield f"{'' if number else 'stages':<11} {name}: {', '.join(filter(None, facts))}"
    for number, (stage, loader) in enumerate(
        zip(task.stages.given, task.stages.loaders, strict=True)
    ):
        if loader is not None and stage.train is not None and number:
            name = task.stages.label(number)
            yield f"data        {name}: {_size(loader)}"


def _hook_lines(built: Built) -> Iterator[str]:
    dispatcher = Dispatcher(built.hooks)
    yield "hooks, in the order they are called"
    for event in EVENTS:
        names = dispatcher.listeners(event)
        if names:
            yield f"  {event:<18} {', '.join(names)}"


def _group_lines(task: Task) -> Iterator[str]:
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


def _schedule_lines(task: Task) -> Iterator[str]:
    """Where the schedules are drawn, and which stages cannot be."""
    plans = task.stages.plans()
    if not task.rates or not any(plan.updates for plan in plans):
        return
    yield ""
    for number, plan in enumerate(plans):
        if plan.trains and not plan.updates:
            name = task.stages.label(number)
            why = "whose length is a time" if plan.known else "whose passes may be of any length"
            yield f"schedules   not drawn for {name}, {why}"
    yield f"schedules   {_draw(_follow(task, plans), task)}"


class _Curves:
    """Values of every scheduled option over the run's updates.

    Attributes:
        lines: by optimizer, option and group, the updates and the values.
        panels: every optimizer and option, in order.
        borders: the updates after which a stage begins.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str, int], tuple[list[int], list[float]]] = {}
        self.panels: dict[tuple[str, str], None] = {}
        self.borders: list[int] = []

    def look(self, task: Task, update: int) -> None:
        """Take down what update number ``update`` of the run uses."""
        for name, rates in task.rates.items():
            for option in rates.options:
                self.panels[name, option] = None
                for index, value in rates.values(option):
                    places, values = self.lines.setdefault((name, option, index), ([], []))
                    places.append(update)
                    values.append(value)


def _follow(task: Task, plans: list[PhasePlan]) -> _Curves:
    """The curves of all stages, each as long as planned; the last stage is then the one at hand."""
    curves, total = _Curves(), sum(plan.updates for plan in plans)
    for number, plan in enumerate(plans):
        if number:
            _enter(task, number, plan)
        if not plan.updates:
            continue
        if plan.origin.updates:
            curves.borders.append(plan.origin.updates)
        points = max(1, round(_POINTS * plan.updates / total))
        for k in sorted({round(i * (plan.updates - 1) / points) for i in range(points + 1)}):
            for name, rates in task.rates.items():
                # Where nobody knows when epochs begin, nothing is scheduled by them.
                epochs = int(plan.epochs_at(k)) if plan.known else 0
                rates.set(k // task.every[name], epochs)
            curves.look(task, plan.origin.updates + k + 1)
    return curves


def _enter(task: Task, number: int, plan: PhasePlan) -> None:
    """Make a stage the one at hand, as if those before it were done."""
    progress = task.progress
    progress.stage = number
    progress.epoch = progress.stage_epochs = plan.origin.epochs
    progress.updates = progress.stage_updates = plan.origin.updates
    task.stages.enter()


def _draw(curves: _Curves, task: Task) -> Path:
    """A panel for every scheduled option, a line in it for each group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 * max(1, len(curves.panels))), layout="constrained")
    for number, (name, option) in enumerate(curves.panels):
        axes = figure.add_subplot(len(curves.panels), 1, number + 1)
        groups = task.optimizers[name].param_groups
        for index, group in enumerate(groups):
            if (name, option, index) in curves.lines:
                label = str(group.get("name", index))
                axes.plot(*curves.lines[name, option, index], label=label)
        for border in curves.borders:
            axes.axvline(border + 0.5, color="grey", linestyle=":")
        axes.set(xlabel="update", ylabel=option, title=name if len(task.rates) > 1 else "")
        axes.grid(alpha=0.3)
        if 1 < len(groups) <= 12:
            axes.legend()
    folder = task.folder.path if task.folder else Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "plan.png", dpi=120)
    return folder / "plan.png"
