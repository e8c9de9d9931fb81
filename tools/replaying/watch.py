"""Watching an update: every operation of torch, every module and every gradient of it.

Operations are seen below autograd, in forward, backward and the optimizer's step alike, with what
they were given and what they gave; nothing of it is changed. Anomaly detection keeps, for every
node of the graph, the line that made it. It could also stop at a NaN in backward: here an update
is looked at to its end.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.task import Task
from phaseloop.tools.replaying.found import BadData, Event
from phaseloop.tools.replaying.measure import Clock
from phaseloop.tools.replaying.places import Places
from phaseloop.tools.replaying.samples import bad_data, ids, roots
from phaseloop.tools.replaying.values import (
    bad_rows,
    count_bad,
    line_of,
    shapes_of,
    state_of,
    tensors_of,
)

_KEPT = 256  # events of one update; more come from a model that does not mind infinities

# What these give is memory as it was found.
_UNSET = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"}
# The same values in another place.
_COPIES = {"_to_copy", "clone", "lift_fresh", "contiguous"}


class Watch:
    """Everything that is seen of one update.

    Args:
        task: the task, built.
        clock: knows what the step is at.

    Attributes:
        events: operations that made something that is not finite, in order.
        batches: the micro-batches of the update, in order.
        data: what of them is not finite.
        places: what is known of the memory.
        gradients: parameters whose gradients were not finite, in the order they came, each with
            the number of the micro-batch and what made it so.
    """

    def __init__(self, task: Task, clock: Clock) -> None:
        self._task = task
        self._clock = clock
        self.events: list[Event] = []
        self.batches: list[Batch] = []
        self.data: list[BadData] = []
        self.gradients: dict[str, tuple[int, list[Event]]] = {}
        self._batch: Batch | None = None
        self._modules: list[tuple[str, str]] = []
        # The numbers that autograd gave its nodes while a module was at work, innermost first.
        self._nodes: list[tuple[int, int, tuple[str, str]]] = []
        self._causes: list[int | None] = []  # of each event, the one before it, if it has one
        self.places = Places(task)

    # --- around the update ---

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Listen to modules and gradients."""
        with contextlib.ExitStack() as undo:
            for prefix, root in roots(self._task).items():
                for name, module in root.named_modules():
                    label = f"{prefix}{name}".rstrip("."), type(module).__name__
                    self._listen(module, label, undo)
            for prefix, root in roots(self._task).items():
                for name, parameter in root.named_parameters():
                    if parameter.requires_grad:
                        handle = parameter.register_post_accumulate_grad_hook(
                            self._gradient_hook(prefix + name)
                        )
                        undo.callback(handle.remove)
            yield

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at every operation."""
        with torch.autograd.set_detect_anomaly(True, check_nan=False), _Mode(self):
            yield

    def note(self, batch: Batch | None) -> None:
        """The step is at work on this micro-batch."""
        if batch is None or batch is self._batch:
            return
        self._batch = batch
        if all(batch is not known for known in self.batches):
            self.batches.append(batch)
            with _disable_current_modes():
                for bad, tensor in bad_data(self._task, batch, len(self.batches)):
                    self.data.append(bad)
                    self.places.add_source(tensor, f"the data ({bad.path})")

    # --- listening ---

    def _listen(
        self, module: nn.Module, label: tuple[str, str], undo: contextlib.ExitStack
    ) -> None:
        entered: list[int] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._modules.append(label)
            entered.append(torch.autograd._get_sequence_nr())

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not entered:  # the module was not begun
                return
            first = entered.pop()
            last = torch.autograd._get_sequence_nr()
            self._nodes.append((first, last, label))
            with _disable_current_modes():  # looking at it is no operation of the update
                self._check_module(args, kwargs, output)
            self._modules.pop()

        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        )
        for handle in handles:
            undo.callback(handle.remove)

    def _check_module(self, args: Any, kwargs: Any, output: Any) -> None:
        """For what is computed outside torch."""
        given = [state_of(t) for t in tensors_of((args, kwargs))]
        gave = [t for t in tensors_of(output) if any(state_of(t)) and not self.places.is_known(t)]
        if gave and not any(nan or inf for nan, inf in given):
            self.places.set_origin(gave, self._add_event("made", "", gave, [], ""))

    def _gradient_hook(self, name: str) -> Any:
        def look(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.note_gradient(name, parameter.grad)

        return look

    def note_gradient(self, name: str, gradient: Tensor) -> None:
        """A parameter has got a gradient."""
        with _disable_current_modes():
            if name not in self.gradients and any(state_of(gradient)):
                self.gradients[name] = self.number, self.chain(gradient)

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and judge it."""
        name = func.overloadpacket.__name__
        if name in _UNSET or len(self.events) >= _KEPT:
            return func(*args, **kwargs)
        self.note(self._task.batch)
        leaves = pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        states = [state_of(tensor) for tensor in given]
        cause = self.places.origin_of(given) if any(map(any, states)) else None
        shapes = shapes_of(given)
        out = func(*args, **kwargs)
        gave = tensors_of(out)
        if name in _COPIES:
            self.places.follow(given, gave)
        # An operation that changes a tensor in place need not return it.
        changed = gave or (tensors_of(args[:1]) if args else [])
        bad = [tensor for tensor in changed if any(state_of(tensor))]
        if bad and not func.is_view:
            on_purpose = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)
            event = cause
            if not on_purpose and name not in _COPIES:
                told = f"{shapes} -> {shapes_of(changed)}"
                event = self._judge(str(func), given, states, bad, told, cause)
            self.places.set_origin(bad, event)
        return out

    def _judge(
        self,
        operation: str,
        given: list[Tensor],
        states: list[tuple[bool, bool]],
        bad: list[Tensor],
        shapes: str,
        cause: int | None,
    ) -> int | None:
        """The event that ``bad`` comes from: this operation, or an earlier one."""
        nan = any(state[0] for state in states)
        inf = any(state[1] for state in states)
        sources = [
            self.places.source_of(tensor)
            for tensor, state in zip(given, states, strict=True)
            if any(state)
        ]
        if read := next(filter(None, sources), ""):
            known = (n for n, event in enumerate(self.events) if event.source == read)
            number = next(known, None)
            if number is None:
                number = self._add_event("read", operation, bad, given, shapes, read)
            return number
        if not nan and not inf:
            return self._add_event("made", operation, bad, given, shapes)
        if not nan and any(state_of(tensor)[0] for tensor in bad):
            return self._add_event("nan", operation, bad, given, shapes, cause=cause)
        return cause

    def _add_event(
        self,
        kind: str,
        operation: str,
        bad: list[Tensor],
        given: list[Tensor],
        shapes: str,
        source: str = "",
        cause: int | None = None,
    ) -> int:
        stage, module, line = self._clock.stage, self._modules[-1] if self._modules else None, ""
        node = torch._C._current_autograd_node()
        if node is not None:
            stage, operation = "backward", f"{operation} of {node.name().split('::')[-1]}"
            module = module or self._module_of(node._sequence_nr())
            line = line_of(_metadata(node).get("traceback_") or [])
        elif stage != "update":
            line = line_of(traceback.format_list(traceback.extract_stack()))
        self.events.append(
            Event(
                kind=kind,
                stage=stage,
                module=None if module is None else module[0],
                module_class="" if module is None else module[1],
                operation=operation,
                shapes=shapes,
                result=count_bad(bad),
                parameters=self.places.names_of([*bad, *given]),
                source=source,
                line=line,
                micro_batch=self.number,
                rows=bad_rows(bad[0], self._batch),
            )
        )
        self._causes.append(cause)
        return len(self.events) - 1

    @property
    def number(self) -> int:
        """Number of the micro-batch at hand, from 1; 0: none is."""
        return next((n for n, b in enumerate(self.batches, 1) if b is self._batch), 0)

    def _module_of(self, sequence: int) -> tuple[str, str] | None:
        """The innermost module that was at work when autograd made a node."""
        for first, last, label in self._nodes:
            if first <= sequence < last:
                return label
        return None

    def chain(self, tensor: Tensor) -> list[Event]:
        """The events that made ``tensor`` not finite, the first of all first."""
        with _disable_current_modes():
            number = self.places.origin_of([tensor])
        found: list[Event] = []
        while number is not None:
            found.insert(0, self.events[number])
            number = self._causes[number]
        return found

    def samples(self, number: int, rows: list[int] | None = None) -> list[int | str]:
        """Samples of a micro-batch, by its number from 1."""
        return ids(self._task, self.batches[number - 1], rows)


class _Mode(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.look(func, args, kwargs or {})


def _metadata(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = node.metadata
    return found
