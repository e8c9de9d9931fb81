"""Hook ``fit_memory``: out of memory, the micro-batch is halved and the update begun again."""

import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from phaseloop.engine.assembly import training_data
from phaseloop.engine.data.loaders import AnyLoader
from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.proof import Found, Proof, RedoError, meet_in_forward
from phaseloop.engine.registry import register_hook
from phaseloop.engine.step_facts import Step
from phaseloop.engine.task import Task
from phaseloop.engine.window_start import WindowStart

log = logging.getLogger("phaseloop")

# What cuBLAS says where torch's allocator has left no memory to it.
_ALSO = "CUBLAS_STATUS_ALLOC_FAILED"


@register_hook("fit_memory")
class FitMemory(Hook):
    """Finds the largest micro-batch that fits, by halving, in train phases and in tests.

    The batch at hand is done again from its start, in more pieces; what the broken attempt has
    changed is put back before (see :class:`WindowStart`). The size found holds for the rest of
    the run, for that set of samples, and is in the checkpoint.

    Several processes begin an update again together, so that it has to be whole on all of them
    before its gradients are reduced. That is slower than to reduce while backward runs, so they do
    it for some updates only, until the size counts as proven; after that, to run out of memory is
    an error. In tests each finds its size for itself.

    Args:
        least: smallest micro-batch to go down to.
        prove: on several processes, updates until a size counts as proven.

    Raises:
        ConfigError: ``least`` or ``prove`` is less than 1.
        torch.OutOfMemoryError: from the train step, where nothing smaller is left, or an
            optimizer has already stepped in the batch; the message says which.

    Attributes:
        sizes: by the place of a set in the configuration, such as ``data.train``, the size found.
    """

    def __init__(self, least: int = 1, prove: int = 20) -> None:
        for name, value in (("least", least), ("prove", prove)):
            if value < 1:
                raise ConfigError(f"hooks.fit_memory.{name}", f"{value} is less than 1")
        self.least = least
        self.prove = prove
        self.sizes: dict[str, int] = {}
        self._proof: Proof | None = None

    def on_start(self, task: Task) -> None:
        self._check(task)
        self.sizes = {}
        if task.agreement is None:
            task.window_start = WindowStart(task)
        else:
            task.window_start = self._proof = Proof(task, self.prove)
        task.stages.guard_steps(self._guarded)

    def on_resume(self, task: Task) -> None:
        for loader in _loaders(task):
            if loader.key in self.sizes:
                loader.cut_smaller(self.sizes[loader.key])

    def on_step(self, task: Task) -> None:
        if self._proof is not None and task.updated:
            self._proof.count()

    def on_phase_end(self, task: Task) -> None:
        if task.agreement is not None and not task.train:
            self._share(task)

    def on_end(self, task: Task, outcome: Any) -> None:
        if task.window_start is not None:
            task.window_start.let_go()

    def state_dict(self) -> dict[str, Any]:
        proof = {} if self._proof is None else {"proven": self._proof.state()}
        return {"sizes": dict(self.sizes), **proof}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._take(state["sizes"])  # a size found since that state stays found
        if self._proof is not None:
            self._proof.load(state.get("proven", []))

    def _check(self, task: Task) -> None:
        key = f"hooks.{self.name}"
        if task.window_start is not None:
            raise ConfigError(key, "there is another hook of this kind; leave one out")
        if task.backend.lazy:
            raise ConfigError(
                key,
                "on this device memory is asked for when a step is over and its program runs, and "
                "then nothing can be begun again; leave the hook out, and set "
                "data.train.micro_batch_size",
            )
        if task.agreement is not None and meet_in_forward(task):
            raise ConfigError(
                key,
                "processes have to go through this model together, as often as each other (it is "
                "sharded, or has synchronised batch norms), and one that runs out of memory cannot "
                "wait for the others; leave the hook out, and set data.train.micro_batch_size",
            )
        for number, (_, facts) in enumerate(task.stages.steps):
            if facts.one_piece:
                stage = f" of stage {task.stages.label(number)}" if task.stages.several else ""
                raise ConfigError(
                    key,
                    f"the train step{stage} works on whole batches only, which cannot be cut; "
                    f"leave the hook out, and make data.train.batch_size smaller",
                )
        resting = {id(module) for module in task.evaluating()}
        trained = training_data(task)
        if trained and any(_takes_statistics(m, resting) for m in task.bare_model.modules()):
            log.warning(
                "the model has batch norms, which take statistics over one micro-batch: where "
                "hooks.%s makes these smaller, that is another update",
                self.name,
                extra=ALIKE,
            )
        for place, data in trained.items():
            if data.batch_transform is not None:
                log.warning(
                    "%s.batch_transform mixes samples of one micro-batch: where hooks.%s makes "
                    "these smaller, that is another update",
                    place,
                    self.name,
                    extra=ALIKE,
                )

    def _guarded(self, step: Step) -> Step:
        def guarded(task: Task) -> None:
            while True:
                try:
                    step(task)
                    return
                except RuntimeError as error:
                    if not _is_out_of_memory(error):
                        raise
                    size = self._smaller(task, error)
                except RedoError:
                    size = self._smaller(task, None)
                # Behind the error: its frames hold on to batch, output and graph.
                self._begin_again(task, size)
                if task.step_is_empty:  # the collate function has nothing for the first piece
                    return

        return guarded

    def _smaller(self, task: Task, error: BaseException | None) -> int:
        """The size to go on with: the one place that decides.

        Args:
            error: None: another process has run out of memory, not this one.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        assert task.window_start is not None
        size, why = _largest(task.accumulator.window), task.window_start.why_not()
        first_line, place = str(error).split("\n", 1)[0], ""
        if self._proof is not None and task.train:
            met = self._proof.met(error is not None, Found(size, why, first_line))
            size, why, first_line = met.found
            place = f" on rank {met.rank}"
        smaller = max(self.least, -(-size // 2))
        if smaller >= size:
            why = "there are no smaller ones"
            if self.least > 1:
                why = f"hooks.{self.name}.least={self.least} allows no smaller ones"
        elif why:
            key = task.loaders[task.phase.name].key
            why = f"{why}; resume with {key}.micro_batch_size={smaller}"
        if why:
            said = f"{_where(task, size)}{place}: {why} ({first_line})"
            raise torch.OutOfMemoryError(said) from error
        return smaller

    def _begin_again(self, task: Task, size: int) -> None:
        assert task.window_start is not None
        loader = task.loaders[task.phase.name]
        before = _largest(task.accumulator.window)
        if self._proof is not None and task.train:
            before = self._proof.size
        self._tell(task, loader, before, size)
        task.drop_attempt()
        gc.collect()
        task.window_start.put_back()
        task.backend.free_memory()
        loader.cut_smaller(size)
        self.sizes[loader.key] = size
        task.fetch_again()

    def _take(self, sizes: Mapping[str, int]) -> None:
        for key, size in sizes.items():
            self.sizes[key] = min(size, self.sizes.get(key, size))

    def _share(self, task: Task) -> None:
        """What each process has found in a test, all know."""
        for sizes in task.backend.all_gather_object(self.sizes):
            self._take(sizes)
        self.on_resume(task)

    def _tell(self, task: Task, loader: AnyLoader, before: int, size: int) -> None:
        log.warning(
            "%s: now %d; set %s.micro_batch_size=%d%s to start so",
            _where(task, before),
            size,
            loader.key,
            size,
            "" if loader.plan.accumulate is None else " in place of accumulate",
        )
        task.recorder.event(
            "fit_memory",
            update=task.progress.updates + task.train,
            data=loader.key,
            before=before,
            micro_batch_size=size,
        )


def _takes_statistics(module: nn.Module, resting: set[int]) -> bool:
    """A batch norm that sees its micro-batch as one, and not only what it has learned."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return module.running_mean is None or (module.training and id(module) not in resting)


def _loaders(task: Task) -> list[AnyLoader]:
    """Of every set, those of other stages too."""
    trained = [loader for loader in task.stages.loaders if loader is not None]
    return list({id(x): x for x in [*task.loaders.values(), *trained]}.values())


def _largest(window: Window) -> int:
    """Samples in the largest micro-batch."""
    return max(piece.stop - piece.start for piece in window.pieces)


def _where(task: Task, size: int) -> str:
    update = task.progress.updates
    place = f"at update {update + 1}" if task.train else f"in {task.phase.name} at update {update}"
    return f"out of memory {place} with micro-batches of {size}"


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _ALSO in str(error)
