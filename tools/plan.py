"""``plan=true``: what a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phaseloop.engine import plan_report
from phaseloop.engine.config.build import Built
from phaseloop.engine.events import EVENTS, Dispatcher
from phaseloop.engine.model_summary import summarize_task
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.report import by_epoch, counted
from phaseloop.engine.task import Task

_POINTS = 400  # more than a picture has pixels to show


def show_plan(built: Built) -> None:
    """Print phases, sizes, hooks, model and groups; draw the schedules to ``plan.png``."""
    task = built.task
    task.build()
    model = summarize_task(task).lines()
    for line in (*_phase_lines(task), "", *_hook_lines(built), "", *model, *_group_lines(task)):
        print(line)
    if task.rates and task.plan.updates:
        print(f"\nschedules   {_draw_schedules(task)}")


def _phase_lines(task: Task) -> Iterator[str]:
    plan = task.plan
    if task.stages.several:
        yield from _stage_lines(task)
    elif TRAIN in task.loaders:
        loader = task.loaders[TRAIN]
        lengths = by_epoch({first: cut.windows for first, cut in loader.plans.items()})
        yield f"training    {plan.epochs:g} epochs of {lengths} updates: {plan.updates} updates"
        for first, cut in loader.plans.items():
            pieces = len(cut.window(0).pieces)
            since = f"from epoch {first}: " if len(loader.plans) > 1 else ""
            yield (
                f"batch       {since}{cut.batch_size} samples, in {pieces} micro-batch"
                f"{'es' if pieces > 1 else ''}; the last of an epoch "
                f"{cut.window(cut.windows - 1).samples}"
            )
    for name, loader in task.loaders.items():
        batches = f"{loader.windows:,} batch{'' if loader.windows == 1 else 'es'}"
        yield f"data        {name}: {counted(loader.samples, 'sample')} in {batches}"
    if plan.test_sets and not task.stages.several:
        cadence = plan_report.cadence(plan).removeprefix("test ")
        yield f"testing     {f'{cadence}, and after the last update' if cadence else 'never'}"
    if options := task.model_options.describe():
        yield f"model       {', '.join(options)}"
    yield f"device      {task.device}, {task.backend.world_size} process"
    yield f"folder      {task.folder.path if task.folder else 'none: nothing is saved'}"


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
            yield f"data        {name}: {loader.samples} samples in {loader.windows} batches"


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


def _draw_schedules(task: Task) -> Path:
    """A panel for every scheduled option: its value at each update, a line for each group."""
    from matplotlib.figure import Figure

    updates, lengths = task.plan.updates, task.plan.lengths
    at = sorted({round(i * (updates - 1) / _POINTS) for i in range(_POINTS + 1)})
    panels = [(name, option) for name, rates in task.rates.items() for option in rates.options]
    values: dict[tuple[str, str, int], list[float]] = {}
    for k in at:
        for name, rates in task.rates.items():
            rates.set(k // task.every[name], lengths.split(k)[0])
            for option in rates.options:
                for index, value in rates.values(option):
                    values.setdefault((name, option, index), []).append(value)
    figure = Figure(figsize=(8, 3 * max(1, len(panels))), layout="constrained")
    for number, (name, option) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, number + 1)
        groups = task.optimizers[name].param_groups
        for index, group in enumerate(groups):
            if (name, option, index) in values:
                label = str(group.get("name", index))
                axes.plot([k + 1 for k in at], values[name, option, index], label=label)
        axes.set(xlabel="update", ylabel=option, title=name if len(task.rates) > 1 else "")
        axes.grid(alpha=0.3)
        if 1 < len(groups) <= 12:
            axes.legend()
    folder = task.folder.path if task.folder else Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "plan.png", dpi=120)
    return folder / "plan.png"
