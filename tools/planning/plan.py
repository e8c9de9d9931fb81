"""Plan: all that is found out of a run that has not begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaseloop.engine.events import Hook
from phaseloop.engine.model_summary import Summary, summarize_task
from phaseloop.engine.task import Task
from phaseloop.tools.planning import facts, memory, timeline
from phaseloop.tools.planning.curves import Curves, follow
from phaseloop.tools.planning.memory import Memory
from phaseloop.tools.planning.timeline import Span


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        name: of the run.
        facts: sentences, each with the word that it is about.
        calls: by event, the hooks that are called.
        hooks: in their order, by name.
        model: parameters and FLOPs.
        memory: of one process.
        spans: the stages in time.
        besides: what may come at times that nobody knows.
        curves: of the schedules.
        groups: by optimizer, the names of its parameter groups.
        group_lines: what each of them has, in words, where an optimizer has several.
        config: the configuration; empty: there is none.
    """

    name: str
    facts: list[facts.Fact]
    calls: dict[str, list[str]]
    hooks: dict[str, Hook]
    model: Summary
    memory: Memory
    spans: list[Span]
    besides: list[str]
    curves: Curves
    groups: dict[str, list[str]]
    group_lines: list[str]
    config: Mapping[str, Any]


def make(task: Task, hooks: Mapping[str, Hook], processes: int = 1) -> Plan:
    """The plan of a built task, which is in its last stage afterwards."""
    ordered = dict(sorted(hooks.items(), key=lambda item: item[1].order))
    return Plan(
        name=task.folder.path.name if task.folder else "run",
        facts=list(facts.facts(task)),
        calls=facts.calls(hooks),
        hooks=ordered,
        model=summarize_task(task),
        memory=memory.estimate(task, hooks, processes),
        spans=timeline.spans(task, hooks),
        besides=timeline.not_drawn(task, hooks),
        groups={
            name: [str(group.get("name", n)) for n, group in enumerate(optimizer.param_groups)]
            for name, optimizer in task.optimizers.items()
        },
        group_lines=list(facts.group_lines(task)),
        config=task.config,
        curves=follow(task),  # last: it goes through the stages
    )
