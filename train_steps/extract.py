"""Train step ``extract``: what a model makes of every sample, to disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phaseloop.engine import features
from phaseloop.engine.backends.primary import on_primary
from phaseloop.engine.checkpoint.weights import FACTS
from phaseloop.engine.errors import ConfigError, DataError, listing, nearest
from phaseloop.engine.registry import register_train_step
from phaseloop.engine.step_sets import check_takes_output, test_sets_of
from phaseloop.engine.task import Task
from phaseloop.engine.urls import place


@register_train_step("extract", whole_model_forward=True)
class Extract:
    """Writes features, targets and indices of each test set to a folder of its own, in the tests.

    It trains nothing: it is for ``only=test``, and for stages without updates. The meters get what
    the model gave, and the target; there is no loss.

    Args:
        output: the model is called as ``model(input, output=OUTPUT)``, and what it gives are the
            features; None: as ``model(input)``.
        layer: the name of a module of the model whose output are the features, in place of the
            model's.
        folder: holds a folder for each test set; None: ``features`` in the run's folder. What an
            earlier extraction left there under the name of the set is replaced.
        samples_per_file: of one process; so many are kept in memory.

    Raises:
        ConfigError: ``output`` and ``layer`` are both given, or a number is less than 1.
    """

    def __init__(
        self,
        output: str | None = None,
        layer: str | None = None,
        folder: str | None = None,
        samples_per_file: int = 8192,
    ) -> None:
        if output is not None and layer is not None:
            raise ConfigError("train_step.layer", "give layer or output, not both")
        if samples_per_file < 1:
            raise ConfigError("train_step.samples_per_file", f"{samples_per_file} is less than 1")
        self.output = output
        self.layer = layer
        self.folder = folder
        self.samples_per_file = samples_per_file
        self._writer: features.PartWriter | None = None
        self._module: nn.Module | None = None

    def check(self, task: Task) -> None:
        """Raises ConfigError where there is training to do, or the model or a folder is not there.

        Only names are looked at; no sample is read.
        """
        sets = test_sets_of(task, self)
        if not sets:
            raise ConfigError(
                "data.test", "the step extract goes through test data, and there is none"
            )
        self._check_length(task)
        if self.output is not None:
            hint = "; name a module by train_step.layer"
            check_takes_output(task, self, "train_step.output", hint)
        if self.layer is not None:
            modules = dict(task.bare_model.named_modules())
            if self.layer not in modules:
                raise ConfigError(
                    "train_step.layer",
                    f"no module of {type(task.bare_model).__name__} is called {self.layer!r}."
                    f"{nearest(self.layer, modules)} There are: {listing(filter(None, modules))}",
                )
            self._module = modules[self.layer]
        for name in sets if task.primary else ():
            try:
                features.check_free(self._folder(task) / name)
            except DataError as error:
                raise ConfigError("train_step.folder", str(error)) from None

    def _check_length(self, task: Task) -> None:
        if task.test_only:
            return
        plans = zip(task.stages.given, task.stages.steps, task.stages.plans(), strict=True)
        for number, (stage, (step, _), plan) in enumerate(plans):
            if step is self and (plan.updates or plan.endless):
                key = stage.key(number) if task.stages.several else "phases"
                raise ConfigError(
                    f"{key}.updates",
                    "the step extract trains nothing: use it with only=test, or set the length to "
                    "0 updates and test_at_start=true",
                )

    def __call__(self, task: Task) -> None:
        batch = task.next_batch()
        with self._watched() as seen:
            output = task.forward(batch.input, **({"output": self.output} if self.output else {}))
        task.measure(None, output, batch.target)
        # The second is a stand-in: its sample is another process's.
        if self._writer is None or not batch.weight:
            return
        found = output if self._module is None else self._single(seen)
        self._writer.add(self._rows(found, batch.target, batch.indices))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[Any]]:
        """Within, what the named module gives at each call is put into the list."""
        seen: list[Any] = []
        if self._module is None:
            yield seen
            return

        def note(module: nn.Module, args: Any, output: Any) -> None:
            # Copied: an operation in place may follow, such as a ReLU.
            seen.append(output.detach().clone() if isinstance(output, Tensor) else output)

        handle = self._module.register_forward_hook(note)
        try:
            yield seen
        finally:
            handle.remove()

    def _single(self, seen: list[Any]) -> Any:
        if len(seen) != 1:
            raise ConfigError(
                "train_step.layer",
                f"{self.layer} was called {len(seen)} times in a forward of the model; features "
                f"are what it gives in a single call",
            )
        return seen[0]

    def _rows(self, found: Any, target: Any, indices: Tensor) -> dict[str, Tensor]:
        key = "train_step.layer" if self.layer is not None else "train_step.output"
        tensors = {"features": found, "indices": indices}
        if target is not None:
            tensors["targets"] = target
        for name, tensor in tensors.items():
            what = key if name == "features" else "data.test"
            if not isinstance(tensor, Tensor):
                raise ConfigError(what, f"{name} are a {type(tensor).__name__}, and not one tensor")
            if tensor.dim() == 0 or len(tensor) != len(indices):
                raise ConfigError(
                    what,
                    f"{name} are {list(tensor.shape)} for a batch of {len(indices)} samples: there "
                    f"must be a row for each",
                )
        return tensors

    # --- a set's beginning and end ---

    def on_phase_start(self, task: Task) -> None:
        """Make the folder that all processes write to; a quick try saves nothing."""
        if task.train or task.debug.fast is not None:
            return
        folder = self._folder(task) / task.phase.name
        unfinished = on_primary(task.backend, lambda: str(features.begin(folder)))
        rank, samples = task.backend.rank, self.samples_per_file
        self._writer = features.PartWriter(Path(unfinished), rank, samples)

    def on_phase_end(self, task: Task) -> None:
        """Write the rest; the folder gets its name."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.flush()
        by_rank = task.backend.all_gather_object((writer.written, writer.tensors))
        written = [part for parts, _ in by_rank for part in parts]
        tensors: list[str] = next((names for _, names in by_rank if names), [])
        folder = self._folder(task) / task.phase.name
        about = self._about(task)
        on_primary(task.backend, lambda: features.finish(folder, written, tensors, about))

    def _about(self, task: Task) -> dict[str, Any]:
        owner, weights = task.swapping.owner, ""
        if task.test_only:
            weights = place(task.resumed_from).name
        elif task.weights is not None and task.progress.updates == 0:
            weights = task.weights.path
        about = {
            "set": task.phase.name,
            "of": self.layer or self.output or "the model's output",
            "weights": weights,
            "averages": owner if task.averages.get(owner) else "",
            "updates": task.progress.updates,
        }
        if FACTS in task.identity:
            about[FACTS] = task.identity[FACTS]
        return about

    def _folder(self, task: Task) -> Path:
        if self.folder is not None:
            return Path(self.folder)
        if task.run.dir is None:
            raise ConfigError("train_step.folder", "the run has no folder; say where to write")
        return Path(task.run.dir) / "features"
