"""Hook ``non_finite``: what happens when a loss, gradient or weight is NaN or infinite."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import ConfigError, NonFiniteError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shards import norms as norms_of
from phaseloop.engine.task import Task
from phaseloop.engine.walk import NO_ROLL_BACK

_POLICIES = ("stop", "skip", "roll_back")
_KEPT = 1024  # so many values are kept with their samples, however far away the log point is
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

    Args:
        policy: ``stop``, ``skip`` or ``roll_back``.
        gradients: with ``stop``: look at every gradient of every update too, on the device, so
            that the parameters can be named; costs one pass over the gradients per update.
        most_roll_backs: one more is an error.

    Raises:
        ConfigError: another policy, or ``gradients`` with a policy that looks at them anyway.
    """

    order = Order.FINITE

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
        self._watched = _Watched()
        self._window: Window | None = None
        # Of the window at hand, by micro-batch: sample ids, and losses.
        self._samples: list[Tensor] = []
        self._losses: list[Tensor] = []

    def on_start(self, task: Task) -> None:
        if self.policy == "roll_back" and any(x and x.is_stream for x in task.stages.loaders):
            raise ConfigError(f"hooks.{self.name}.policy", NO_ROLL_BACK)
        self._watched, self._window = _Watched(), None
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
                self._watch(task, "a gradient", norms.amax(), self._samples, trained, norms)

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
        seen = _Seen(what, value, progress.updates + 1, progress.epoch, progress.windows + 1,
                     samples, trained, norms)  # fmt: skip
        self._watched.add(seen)

    def _leave_out(self, task: Task) -> None:
        """Here the host waits for the device."""
        trained = [p for p in task.trainable if p.grad is not None]
        norms = _norms([p.grad for p in trained])
        if norms is None or bool(norms.isfinite().all()):
            return
        bad = f"not finite: a gradient of {_shown(_named(task, trained, norms))}"
        pairs = list(zip(self._samples, self._losses, strict=True))
        samples = _of_all(task, self._samples)
        if guilty := _of_all(task, [ids for ids, loss in pairs if not bool(loss.isfinite())]):
            bad, samples = f"{bad}, and the loss", guilty
        progress = task.progress
        reason = f"{bad} ({_place(progress.epoch, progress.windows + 1, samples)})"
        if self.policy == "roll_back":
            task.roll_back(reason, self.most_roll_backs)
        else:
            task.skip_update(reason, *self._guilty(task, trained, norms))

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
        watched, self._watched = self._watched, _Watched()
        first, told, found = watched.first_bad(), _weights_told(task), None
        if first is not None:
            said = "; ".join(filter(None, [self._describe(task, first), told]))
            found = first.update, said
        elif told:
            found = task.progress.updates + 1, f"at update {task.progress.updates}, {told}"
        if task.agreement is not None:
            found = _first_of_all(task, found)
        if found is not None:
            raise NonFiniteError(f"{found[1]}; {_HELP}")

    def _describe(self, task: Task, first: _Found) -> str:
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
            f"({_place(seen.epoch, seen.window, seen.samples)})"
        )
        before = first.before
        if before is not None and seen.what == "the loss" and not self._sees_gradients(task):
            # A loss of weights that are not finite: the update before may have made them so.
            told += (
                f", or a gradient of update {before.update} was not "
                f"({_place(before.epoch, before.window, before.samples)}): "
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


class _Seen(NamedTuple):
    """A value that was watched, and where it came from.

    Attributes:
        what: ``the loss`` or ``a gradient``.
        value: one element, on the device; not finite when something was not.
        update: number of the update that it was part of.
        epoch, window: number of the epoch, and of the batch in it.
        samples: dataset indices, by micro-batch.
        trained, norms: parameters, and the norm of each one's gradient; None: not known.
    """

    what: str
    value: Tensor
    update: int
    epoch: int
    window: int
    samples: list[Tensor]
    trained: list[nn.Parameter] | None
    norms: Tensor | None


class _Found(NamedTuple):
    """The first value that was not finite; ``seen`` is None where only its update is known."""

    update: int
    seen: _Seen | None = None
    before: _Seen | None = None


class _Watched:
    """What has been watched since it was last looked at, in order."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._older: Tensor | None = None  # on the device: number of the first bad update, or 0

    def add(self, seen: _Seen) -> None:
        self._seen.append(seen)
        if len(self._seen) >= _KEPT:
            self._condense()

    def first_bad(self) -> _Found | None:
        """Here the host waits for the device."""
        if self._older is not None and (update := int(self._older)):
            return _Found(update)
        if not self._seen:
            return None
        bad = self._flags()
        if not bool(bad.any()):
            return None
        index = int(bad.int().argmax())
        seen = self._seen[index]
        earlier = [entry for entry in self._seen[:index] if entry.update < seen.update]
        return _Found(seen.update, seen, earlier[-1] if earlier else None)

    def _flags(self) -> Tensor:
        return ~torch.stack([entry.value.reshape(()) for entry in self._seen]).isfinite()

    def _condense(self) -> None:
        """On the device, so that what waits for a log point is bounded; the samples are let go."""
        bad = self._flags()
        updates = torch.tensor([entry.update for entry in self._seen], device=bad.device)
        first = torch.where(bad.any(), updates[bad.int().argmax()], 0)
        self._older = (
            first if self._older is None else torch.where(self._older > 0, self._older, first)
        )
        self._seen = []


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


def _first_of_all(task: Task, found: tuple[int, str] | None) -> tuple[int, str] | None:
    """What the processes found, of the earliest update: the same on all of them."""
    assert task.agreement is not None
    if not task.agreement.total(found is not None):
        return None
    told = [
        (update_and_text[0], f"rank {rank}: {update_and_text[1]}")
        for rank, update_and_text in enumerate(task.backend.all_gather_object(found))
        if update_and_text is not None
    ]
    return min(told, key=lambda each: each[0])


def _of_all(task: Task, samples: list[Tensor]) -> list[Tensor]:
    """Sample ids, by micro-batch, of all processes: they are all here."""
    if task.agreement is None:
        return samples
    return [ids for own in task.backend.all_gather_object(samples) for ids in own]


def _named(task: Task, trained: list[nn.Parameter], norms: Tensor) -> list[str]:
    """Names of the parameters whose norm is not finite."""
    names = task.parameter_names()
    flags = norms.isfinite().tolist()
    return [names[id(p)] for p, fine in zip(trained, flags, strict=True) if not fine]


def _place(epoch: int, window: int, samples: list[Tensor]) -> str:
    # A step may go through its window several times.
    once = list({id(indices): indices for indices in samples}.values())
    ids = torch.cat(once).tolist() if once else []
    return f"epoch {epoch}, batch {window}, samples {_shown([str(i) for i in ids])}"


def _shown(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more
