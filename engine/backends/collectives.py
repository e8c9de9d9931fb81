"""Collectives: what several processes do with tensors on their devices, on three things that a
backend can: add up, send from the primary, and gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.backends.messages import by_type, in_messages, once, spread
from phaseloop.engine.errors import ConfigError, PhaseloopError

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class Collectives(Backend):
    """A backend of several processes; one process does nothing in all of this."""

    # --- what a backend gives ---

    def _add(self, tensor: Tensor) -> None:
        """Sum over processes, in place; contiguous."""
        raise NotImplementedError

    def _send(self, tensor: Tensor) -> None:
        """The primary's values, in place: bytes, contiguous."""
        raise NotImplementedError

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Those of all processes, by rank: contiguous, and of one shape on all."""
        raise NotImplementedError

    def _total(self, flat: Tensor) -> Tensor:
        """The sum over processes of gradients, which may be sent in another form than they are."""
        return self.all_reduce(flat)

    # --- what follows from it ---

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not self.host.alone:
            self._add(tensor)
        return tensor

    def gather_with_grad(self, tensor: Tensor) -> Tensor:
        if self.host.alone:
            return tensor
        rows = torch.zeros(self.world_size, dtype=torch.int64)
        rows[self.rank] = len(tensor)
        self.total_on_host(rows)
        return self.gather_all_with_grad([tensor], rows.tolist())[0]

    def gather_all_with_grad(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        if self.host.alone or not tensors:
            return list(tensors)
        return list(_Gathered.apply(rows, self, *tensors))  # type: ignore[no-untyped-call]

    def prepare_criterion(self, criterion: nn.Module) -> None:
        super().prepare_criterion(criterion)
        self._equalise(criterion)

    def _equalise(self, module: nn.Module) -> None:
        """Give every process the primary's parameters and buffers."""
        self.make_equal([parameter.data for parameter in module.parameters()])
        self.make_equal([*module.buffers()])

    @torch.no_grad()
    def make_equal(self, tensors: list[Tensor]) -> None:
        if self.host.alone:
            return
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                found.setdefault(tensor.device, []).append(once(tensor))
        for on_device in found.values():
            for pieces in in_messages(on_device):
                self._send_together(pieces)

    def _send_together(self, tensors: list[Tensor]) -> None:
        """The primary's values for tensors on one device, in one message."""
        types = by_type(tensors)
        # Larger elements first: so each begins at a place that its type may begin at.
        kinds = sorted(types, key=lambda kind: -kind.itemsize)
        parts = [torch.cat([t.detach().reshape(-1) for t in types[kind]]) for kind in kinds]
        # As bytes, since neither gloo nor nccl knows all types.
        sizes = [part.nbytes for part in parts]
        parts = [part.view(torch.uint8) for part in parts]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._send(message)
        if not self.primary:
            for kind, part in zip(kinds, torch.split(message, sizes), strict=True):
                spread(part.view(kind), types[kind])

    @torch.no_grad()
    def _average(self, parameters: list[nn.Parameter]) -> None:
        """In one message for each type; a process without a gradient adds zeros.

        A parameter that no process has a gradient for stays without one.
        """
        for alike in by_type([_gradient(p) for p in self._used(parameters)]).values():
            flat = torch.cat([gradient.reshape(-1) for gradient in alike])
            # Divided first, as torch's wrapper does: the sum of all may be too large for float16.
            spread(self._total(flat.div_(self.world_size)), alike)

    def _used(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Those that some process has a gradient for, each with one: zeros, where it had none."""
        check_dense(parameters)
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64)
        self.total_on_host(has)
        counts = has.tolist()
        if any(0 < count < self.world_size for count in counts):
            self._note_uneven()
        used = [p for p, count in zip(parameters, counts, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used

    def _note_uneven(self) -> None:
        """Some have no gradient where others have one."""


class _Gathered(torch.autograd.Function):
    """The rows of all processes; a row's gradient is the sum of what all of them have for it."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[int], processes: Collectives, *tensors: Tensor) -> Any:
        ctx.rows, ctx.processes = rows, processes
        needed = ctx.needs_input_grad[2:]
        gathered = _by_type(list(tensors), lambda flat: _all_rows(flat, rows, processes))
        ctx.mark_non_differentiable(
            *(one for one, needs in zip(gathered, needed, strict=True) if not needs)
        )
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, processes = ctx.rows, ctx.processes
        needed = [n for n, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        totals = _by_type([gradients[n].clone() for n in needed], processes.all_reduce)
        found: list[Tensor | None] = [None] * len(gradients)
        for number, total in zip(needed, totals, strict=True):
            found[number] = total.narrow(0, sum(rows[: processes.rank]), rows[processes.rank])
        return None, None, *found


def _all_rows(tensor: Tensor, rows: Sequence[int], processes: Collectives) -> Tensor:
    """Those of all processes, one behind the other."""
    if len(tensor) < max(rows):
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        tensor = padded
    found = processes._gather(tensor)
    return torch.cat([one[:count] for one, count in zip(found, rows, strict=True)])


def _by_type(tensors: list[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What ``function`` makes of the tensors' rows; those of one type it gets side by side."""
    found = list(tensors)
    for kind in by_type(tensors):
        places = [number for number, tensor in enumerate(tensors) if tensor.dtype == kind]
        if len(places) == 1:
            found[places[0]] = function(tensors[places[0]].contiguous())
            continue
        alike = [tensors[number] for number in places]
        flat = [tensor.reshape(len(tensor), tensor.shape[1:].numel()) for tensor in alike]
        widths = [one.shape[1] for one in flat]
        parts = torch.split(function(torch.cat(flat, dim=1)), widths, dim=1)
        for number, tensor, part in zip(places, alike, parts, strict=True):
            rows = part.reshape(len(part), *tensor.shape[1:])
            # In memory of its own: a view of what others are views of could not be written to.
            found[number] = rows.clone(memory_format=torch.contiguous_format)
    return found


def check_dense(parameters: list[nn.Parameter]) -> None:
    """Raises PhaseloopError for a sparse gradient, before any is averaged."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise PhaseloopError(
                f"a parameter of shape {[*parameter.shape]} has a sparse gradient, and this "
                f"backend averages dense ones only: make the embedding with sparse=False"
            )


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def check_norms(task: Task, problem: str) -> None:
    """Raises ConfigError for a norm that would ask torch.distributed for the other processes.

    Args:
        problem: what it is here, and what to use in its place.
    """
    for module in (task.bare_model, task.criterion_module):
        if not isinstance(module, nn.Module):
            continue
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise ConfigError("model", f"{name or 'the model'} is {problem}")
