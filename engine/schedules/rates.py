"""Rates: applies schedules to the groups of one optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phaseloop.engine.errors import CheckpointError, ConfigError, listing, nearest
from phaseloop.engine.schedules.schedule import Schedule
from phaseloop.engine.schedules.torch_schedule import Mover, TorchSchedule

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


@dataclass(frozen=True)
class _Applied:
    """A schedule, and the indices and scales of the groups that it is for."""

    schedule: Schedule
    option: str
    base_key: str
    covered: list[tuple[int, float]]


class Rates:
    """Applies schedules to an optimizer's groups.

    A group's base value is the one that the optimizer was made with; it is kept in the group
    under ``base_<option>``, so that it is in every checkpoint. Where a group has ``<option>_scale``
    (:func:`~phaseloop.engine.group_rules.parameter_groups`), the curve's value is multiplied
    by it, and the base is the value without it. A tensor is filled, and stays the one it is.

    Args:
        optimizer: whose groups.
        plan: the schedules; no two for the same option of a group, at most one of torch's.
        batch_size: samples per update, for schedules that scale with it.

    Attributes:
        schedules: those that are spread over the planned length; without torch's.

    Raises:
        ConfigError: no group has the option or name of a schedule, or two schedules set the same.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Sequence[Schedule | TorchSchedule],
        batch_size: int | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.schedules = [s for s in plan if isinstance(s, Schedule)]
        self.were_set = False
        for schedule in plan:
            self._scale(schedule, batch_size)
        self._cover()
        torch_made = [s for s in plan if isinstance(s, TorchSchedule)]
        if len(torch_made) > 1:
            raise ConfigError(torch_made[1].key, "one optimizer takes one scheduler of torch's")
        self.mover = Mover(torch_made[0], optimizer) if torch_made else None
        self._check_mover()

    @property
    def options(self) -> list[str]:
        """What is logged: the learning rate always, and every other option that is scheduled."""
        cycled = ["momentum"] if self._cycles_momentum() else []
        return list(dict.fromkeys(["lr", *(s.option for s in self.schedules), *cycled]))

    def values(self, option: str) -> Iterator[tuple[int, float]]:
        """An option of every group that it is logged for, with the group's number."""
        for number, group in enumerate(self.optimizer.param_groups):
            if option != "lr" and number not in self._scheduled(option):
                continue
            if option in group:
                yield number, float(group[option])
            elif option == "momentum" and "betas" in group:
                yield number, float(group["betas"][0])

    def set(self, updates_done: int, epochs_done: int) -> None:
        """Set every scheduled option for the next update.

        Args:
            updates_done: updates made before it.
            epochs_done: epochs completed before it.
        """
        self.were_set = True
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:  # a hook has added one
            self._cover()
        for applied in self._applied:
            option, base_key = applied.option, applied.base_key
            last_base, value = None, 0.0
            for index, scale in applied.covered:
                group = groups[index]
                base = group[base_key]
                if base != last_base:
                    last_base = base
                    value = applied.schedule.value(base, updates_done, epochs_done)
                now = group["betas"][0] if option == "betas" else group[option]
                if isinstance(now, Tensor):  # a compiled or captured step reads this very tensor
                    now.fill_(value * scale)
                elif option == "betas":
                    group["betas"] = (value * scale, group["betas"][1])
                else:
                    group[option] = value * scale
        if self.mover is not None:
            self.mover.set(updates_done, epochs_done)

    def finish(self, updates_done: int, epochs_done: int) -> None:
        """At the end: a scheduler of torch's has moved for the last update and epoch too."""
        if self.mover is not None:
            self.mover.set(updates_done, epochs_done)

    def check_metric(self, task: Task) -> None:
        """See :meth:`Mover.check_metric`."""
        if self.mover is not None:
            self.mover.check_metric(task)

    def observe(self, task: Task) -> None:
        """See :meth:`Mover.observe`."""
        if self.mover is not None:
            self.mover.observe(task)

    def state_dict(self) -> dict[str, Any]:
        """Of torch's scheduler; ours have no state."""
        return {} if self.mover is None else self.mover.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of :meth:`state_dict`.

        Raises:
            CheckpointError: the checkpoint has a scheduler of torch's and this task none, or the
                reverse, or they are of different classes.
        """
        if bool(state) != (self.mover is not None):
            there, here = ("one", "none") if state else ("none", "one")
            raise CheckpointError(
                f"the checkpoint has {there} of torch's schedulers, this task {here}"
            )
        if self.mover is not None:
            self.mover.load_state_dict(state)

    def _cover(self) -> None:
        """Find out which groups each schedule is for, and note their bases."""
        groups = self.optimizer.param_groups
        self._groups = len(groups)
        self._applied: list[_Applied] = []
        taken: dict[tuple[int, str], str] = {}
        for schedule in self.schedules:
            base_key = f"base_{schedule.option}"
            covered = []
            option = schedule.option
            for index in self._indices(schedule):
                group = groups[index]
                option = self._option(schedule, group)
                if (index, option) in taken:
                    raise ConfigError(
                        schedule.key, f"two schedules set the same option {schedule.option!r}"
                    )
                taken[index, option] = schedule.key
                scale = float(group.get(f"{schedule.option}_scale", 1.0))
                value = group["betas"][0] if option == "betas" else group[option]
                if isinstance(value, Tensor) and any(
                    value is g.get(option) for g in groups[:index]
                ):
                    group[option] = value.clone()  # else they could not differ
                group.setdefault(base_key, float(value))
                covered.append((index, scale))
            self._applied.append(_Applied(schedule, option, base_key, covered))

    def _indices(self, schedule: Schedule | TorchSchedule) -> list[int]:
        """Numbers of the groups that a schedule is for."""
        groups = self.optimizer.param_groups
        wanted = schedule.groups if isinstance(schedule, Schedule) else None
        if wanted is None:
            return list(range(len(groups)))
        names = [str(group.get("name", number)) for number, group in enumerate(groups)]
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"{schedule.key}.groups",
                    f"no parameter group is called {name!r}.{nearest(name, names)} "
                    f"There are: {listing(names)}",
                )
        return [number for number, name in enumerate(names) if name in wanted]

    def _option(self, schedule: Schedule, group: Mapping[str, Any]) -> str:
        option = schedule.option
        if option == "momentum" and option not in group and "betas" in group:
            return "betas"
        if not _is_number(group.get(option)):
            numbers = [key for key, value in group.items() if _is_number(value)]
            raise ConfigError(
                f"{schedule.key}.option",
                f"{type(self.optimizer).__name__} has no option {option!r} that is a number; "
                f"its groups have {listing(numbers)}",
            )
        return option

    def _scale(self, schedule: Schedule | TorchSchedule, batch_size: int | None) -> None:
        rule = schedule.scale_with_batch
        if rule is None or batch_size is None:
            return
        factor = rule.factor(batch_size)
        said: set[float] = set()
        for index in self._indices(schedule):
            group = self.optimizer.param_groups[index]
            before = float(group.get("base_lr", group["lr"]))
            for key in ("lr", "base_lr"):
                if isinstance(value := group.get(key), Tensor):
                    group[key] = torch.full_like(value, float(value) * factor)
                elif value is not None:
                    group[key] = float(value) * factor
            if before not in said:
                said.add(before)
                log.info("%s", rule.describe(before, before * factor, batch_size))

    def _scheduled(self, option: str) -> frozenset[int]:
        """Numbers of the groups for which an option has a schedule."""
        covers = [a.covered for a in self._applied if a.schedule.option == option]
        if not covers:  # torch's
            return frozenset(range(self._groups))
        return frozenset(index for covered in covers for index, _ in covered)

    def _cycles_momentum(self) -> bool:
        return bool(self.mover and getattr(self.mover.scheduler, "cycle_momentum", False))

    def _check_mover(self) -> None:
        """Two that set the same option would undo each other's work."""
        if self.mover is None:
            return
        theirs = {"lr", *(["momentum", "betas"] if self._cycles_momentum() else [])}
        for schedule in self.schedules:
            if schedule.option in theirs:
                raise ConfigError(
                    schedule.key,
                    f"{type(self.mover.scheduler).__name__} sets the same option "
                    f"{schedule.option!r}",
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
