"""Hook ``non_finite``: what happens when a loss, gradient or weight is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import ConfigError, NonFiniteError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shards import norms as norms_of
from phaseloop.engine.task import Task
from phaseloop.engine.walk import NO_ROLL_BACK
from phaseloop.engine.watched import Found, Seen, Watched

_POLICIES = ("stop", "skip", "roll_back")
_SHOWN = 32  # more names or samples would hide the rest of the message


@register_hook("non_finite", default=True)
class NonFinite(Hook):
    """Watches losses and gradients, and names the first update that went wrong, and its samples.

    ``stop`` keeps every loss, and the norm that clipping measures, on the device. They are looked
    at at log points, phase ends and before every save, where the weights are checked too; between
    them nothing waits for the device. ``skip`` leaves out an update whose gradients are not
    finite, and names the parameters; it has to read one flag from the device per update.
    ``roll_back`` looks as ``skip`` does, and goes back to the run's newest checkpoint, from where
    it goes on with its data in another order: in an epoch that is cut so, some samples come twice
    and others not at all.

    Several processes decide each of these together: what is not finite on one ends, or leaves out,
    the update on all, and the message names the process.

    Args:
        policy: ``stop``, ``skip`` or ``roll_back``.
        gradients: with ``stop``: look at every gradient of every update too, on the device, so
            that the parameters can be named; costs one pass over the gradients per update.
        most_roll_backs: one more is an error.

    Raises:
        ConfigError: another policy, or ``gradients`` with a policy that looks at them anyway.
    """

    order = Order.FINITE
    alike = True

    def __init__(
        self, policy: str = "stop", gradients: bool = False, most_roll_backs: int = 10
    ) -> None:
        if policy not in _POLICIES:
            raise ConfigError(
                "hooks.non_finite.policy", f"{policy!r} is not {' or '.join(map(repr, _POLICIES))}"
            )
        if gradients and policy != "stop":
            raise ConfigError("hooks.non_finite.gradients", f"{policy} looks at them anyway")
        if most_roll_backs < 1:
            raise ConfigError(
                "hooks.non_finite.most_roll_backs", f"{most_roll_backs} is less than 1"
            )
        self.policy = policy
        self.gradients = gradients
        self.most_roll_backs = most_roll_backs
        self._to_host: Callable[[list[Tensor]], list[Tensor]] | None = None
        self._watched = Watched()
        self._window: Window | None = None
        # Of the window at hand, by micro-batch: sample ids, and losses.
        self._samples: list[Tensor] = []
        self._losses: list[Tensor] = []

    def on_start(self, task: Task) -> None:
        if self.policy == "roll_back" and any(x and x.is_stream for x in task.stages.loaders):
            raise ConfigError(f"hooks.{self.name}.policy", NO_ROLL_BACK)
        self._to_host = task.backend.to_host if task.backend.lazy else None
        self._watched, self._window = Watched(self._to_host), None
        # A checkpoint of weights that are not finite could only be resumed to fail again.
        task.before_save.append(self._judge)

    def on_backward(self, task: Task) -> None:
        assert task.batch is not None
        if task.accumulator.window is not self._window:
            self._window, self._samples, self._losses = task.accumulator.window, [], []
        loss = task.loss
        if loss is not None:
            loss = loss.detach()
            if self._samples and self._samples[-1] is task.batch.indices:  # a part of a loss
                self._losses[-1] = self._losses[-1] + loss
            else:
                self._samples.append(task.batch.indices)
                self._losses.append(loss)
            if self.policy == "stop":
                self._watch(task, "the loss", loss, self._samples[-1:])

    def on_gradients(self, task: Task) -> None:
        if self.policy != "stop":
            # The loss scaler looks at gradients by itself, and an overflow is no fault of theirs;
            # a loss that is not finite before it was scaled is one.
            if task.precision.scaler is None or not self._losses_are_finite(task):
                self._leave_out(task)
        elif self.gradients and task.precision.scaler is None:
            trained = [p for p in task.trainable if p.grad is not None]
            norms = _norms([p.grad for p in trained])
            if norms is not None:
                # Not the largest: where one is NaN, XLA gives that of the others.
                fine = torch.where(norms.isfinite().all(), 0.0, float("nan"))
                self._watch(task, "a gradient", fine, self._samples, trained, norms)

    def on_update(self, task: Task) -> None:
        if self.policy == "stop" and task.gradient_norm is not None:
            self._watch(task, "a gradient", task.gradient_norm, self._samples)

    def on_step(self, task: Task) -> None:
        if task.recorder.due:
            self._judge(task)

    def on_phase_end(self, task: Task) -> None:
        self._judge(task)

    def _watch(
        self,
        task: Task,
        what: str,
        value: Tensor,
        samples: list[Tensor],
        trained: list[nn.Parameter] | None = None,
        norms: Tensor | None = None,
    ) -> None:
        progress = task.progress
        seen = Seen(what, value, progress.updates + 1, progress.epoch, progress.windows + 1,
                     samples, trained, norms)  # fmt: skip
        self._watched.add(seen)

    def _leave_out(self, task: Task) -> None:
        """Here the host waits for the device."""
        if task.backend.lazy:  # with what all do together done, each may read for itself
            task.backend.mark_step()
        trained = [p for p in task.trainable if p.grad is not None]
        norms = _norms([p.grad for p in trained])
        if not _any(task, norms is not None and not bool(norms.isfinite().all())):
            return
        reason = self._reason(task, [] if norms is None else _named(task, trained, norms))
        if self.policy == "roll_back":
            task.roll_back(reason, self.most_roll_backs)
        else:
            names = [] if norms is None else self._guilty(task, trained, norms)
            task.skip_update(reason, *names)

    def _reason(self, task: Task, names: list[str]) -> str:
        """What was not finite, in the same words on every process."""
        pairs = list(zip(self._samples, self._losses, strict=True))
        guilty = [ids for ids, loss in pairs if not bool(loss.isfinite())]
        told = task.backend.all_gather_object((names, _ids(guilty), _ids(self._samples)))
        named = next(names for names, _, _ in told if names)
        bad = f"not finite: a gradient of {_shown(named)}"
        ranks = [str(rank) for rank, (_, guilty, _) in enumerate(told) if guilty]
        ids = [i for _, guilty, all_ in told for i in (guilty if ranks else all_)]
        if ranks:
            bad += ", and the loss"
            if len(told) > 1:
                bad += f" on rank {_shown(ranks)}"
        return f"{bad} ({_place(task.progress.epoch, task.progress.windows + 1, ids)})"

    def _losses_are_finite(self, task: Task) -> bool:
        """Of this window, on all processes; here the host waits for the device."""
        fine = not self._losses or bool(torch.stack(self._losses).isfinite().all())
        return fine if task.agreement is None else not task.agreement.total(not fine)

    @staticmethod
    def _guilty(task: Task, trained: list[nn.Parameter], norms: Tensor) -> list[str]:
        """The optimizers, of several at hand, whose gradients are not finite; empty: all."""
        flags = norms.isfinite().tolist()
        bad = {id(p) for p, fine in zip(trained, flags, strict=True) if not fine}
        found = [
            name for name in task.stepping if any(id(p) in bad for p in task.parameters_of[name])
        ]
        return found if len(found) < len(task.stepping) else []

    def _judge(self, task: Task) -> None:
        """Here the host waits for the device."""
        watched, self._watched = self._watched, Watched(self._to_host)
        first, weights = watched.first_bad(), _weights_told(task)
        if not _any(task, first is not None or bool(weights)):
            return
        update, told = task.progress.updates, weights
        if first is not None:
            update = first.update
            told = "; ".join(filter(None, [self._describe(task, first), weights]))
        elif weights:
            told = f"at update {update}, {weights}"
        raise NonFiniteError(f"{_earliest(task, update, told)}; {_HELP}")

    def _describe(self, task: Task, first: Found) -> str:
        seen = first.seen
        if seen is None:
            return (
                f"the loss or a gradient of update {first.update} is the first that is not finite "
                f"(too long ago to know its samples: a lower run.log_every keeps them)"
            )
        names = ""
        if seen.norms is not None and seen.trained is not None:
            names = f": {_shown(_named(task, seen.trained, seen.norms))}"
        told = (
            f"{seen.what} of update {seen.update} is not finite{names} "
            f"({_place(seen.epoch, seen.window, _ids(seen.samples))})"
        )
        before = first.before
        if before is not None and seen.what == "the loss" and not self._sees_gradients(task):
            # A loss of weights that are not finite: the update before may have made them so.
            told += (
                f", or a gradient of update {before.update} was not "
                f"({_place(before.epoch, before.window, _ids(before.samples))}): "
                f"hooks.non_finite.gradients=true tells which"
            )
        return told

    def _sees_gradients(self, task: Task) -> bool:
        clipped = [settings.clip_norm is not None for settings in task.clipping.values()]
        return self.gradients or all(clipped)


_HELP = (
    "lower the learning rate, clip gradients (gradients.clip_norm), or set "
    "hooks.non_finite.policy=skip"
)


def _norms(tensors: list[Tensor | None]) -> Tensor | None:
    """The largest absolute value of each, NaN where one is: [number of tensors]; None: of none."""
    wanted = [t for t in tensors if t is not None and (t.is_floating_point() or t.is_complex())]
    if not wanted:
        return None
    return norms_of(wanted, float("inf"))


def _weights_told(task: Task) -> str:
    """Which weights are not finite; empty: all are. Of sharded ones all processes are asked."""
    weights = [
        (n, v) for n, v in task.swapping.raw_parameters() if v.is_floating_point() or v.is_complex()
    ]
    norms = _norms([value for _, value in weights])
    if norms is None or bool(norms.isfinite().all()):
        return ""
    flags = norms.isfinite().tolist()
    bad = [name for (name, _), fine in zip(weights, flags, strict=True) if not fine]
    return f"weights that are not finite now: {_shown(bad)}"


def _named(task: Task, trained: list[nn.Parameter], norms: Tensor) -> list[str]:
    """Names of the parameters whose norm is not finite."""
    names = task.parameter_names()
    flags = norms.isfinite().tolist()
    return [names[id(p)] for p, fine in zip(trained, flags, strict=True) if not fine]


def _any(task: Task, flag: bool) -> bool:
    """Whether this is so on any process."""
    return flag if task.agreement is None else task.agreement.total(flag) > 0


def _earliest(task: Task, update: int, told: str) -> str:
    """What the process tells that saw the first update go wrong; empty: one saw nothing."""
    by_rank = task.backend.all_gather_object((update, told))
    seen = [(update, rank, told) for rank, (update, told) in enumerate(by_rank) if told]
    _, rank, first = min(seen)
    # Weights are the same on all, and then so is what is said of them.
    alike = len(seen) == len(by_rank) and len({told for *_, told in seen}) == 1
    return first if alike else f"rank {rank}: {first}"


def _ids(samples: list[Tensor]) -> list[int]:
    # A step may go through its window several times.
    once = list({id(indices): indices for indices in samples}.values())
    return [int(i) for i in torch.cat(once).tolist()] if once else []


def _place(epoch: int, window: int, ids: list[int]) -> str:
    return f"epoch {epoch}, batch {window}, samples {_shown([str(i) for i in ids])}"


def _shown(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more
