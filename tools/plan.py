"""``plan=true``: what a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phaseloop.engine.config.build import Built
from phaseloop.engine.task import Task
from phaseloop.tools.planning import curves, page, pictures
from phaseloop.tools.planning.plan import Plan, make

PICTURE, PAGE = "plan.png", "plan.html"


def show_plan(built: Built, processes: int = 1) -> None:
    """Print what the run would do, and draw it to ``plan.html`` and ``plan.png``.

    Args:
        processes: that the run itself would start; what is printed is one process's.
    """
    task = built.task
    task.build()
    plan = make(task, built.hooks, processes)
    if not task.primary:
        return
    for line in lines(task, plan):
        print(line)
    for line in draw(task, plan):
        print(line)


def lines(task: Task, plan: Plan) -> Iterator[str]:
    """The plan in words."""
    for word, fact in plan.facts:
        yield f"{word:<11} {fact}"
    yield ""
    yield "hooks, in the order they are called"
    for event, names in plan.calls.items():
        yield f"  {event:<18} {', '.join(names)}"
    yield ""
    yield from plan.model.lines()
    yield from plan.group_lines
    yield ""
    yield from plan.memory.lines()
    if plan.memory.processes > task.backend.world_size:
        yield ""
        yield (
            f"The run starts {plan.memory.processes} processes, each with its share of every "
            f"batch; what is said of micro-batches here, but for the memory, is as one process has "
            f"them."
        )


def draw(task: Task, plan: Plan) -> Iterator[str]:
    """Write the picture and the page; lines that say where they are."""
    folder = task.folder.path if task.folder else Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    yield ""
    if plan.curves.lines:
        for stage in curves.not_drawn(task):
            yield f"schedules   not drawn for {stage}"
        yield f"schedules   {folder / PICTURE}"
    (folder / PICTURE).write_bytes(pictures.whole(plan))
    (folder / PAGE).write_text(page.page(plan), encoding="utf-8")
    yield f"page        {folder / PAGE}"
