"""Meters over processes: what each measured is put together when a phase is read.

Three exchanges for a whole set of meters, however many there are: what every process has, by the
host; the sums, by one all-reduce for each dtype and device; and the states of torchmetrics, by one
all-gather of bytes. On every process the state is its own again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.metric_states import PartState
from phaseloop.engine.torch_metric import TorchMetric
from phaseloop.engine.trees import copied

if TYPE_CHECKING:
    from phaseloop.engine.backends.base import Backend


@contextmanager
def over_ranks(
    meters: Mapping[str, Any], make: Callable[[], Any], backend: Backend
) -> Iterator[dict[str, Any]]:
    """Within, the meters hold what all processes measured; all processes have to come here.

    Args:
        meters: name to meter, of this process.
        make: a clean meter, for a name that only other processes have.

    Yields:
        Name to meter, of all processes and in the same order on each.

    Raises:
        ConfigError: a meter's sums have other shapes or dtypes on another process.
    """
    bytes_ = _Bytes(backend.device)
    own = {
        key: bytes_.described(meter.states()) if isinstance(meter, TorchMetric) else _sums(meter)
        for key, meter in meters.items()
    }
    by_rank = backend.all_gather_object((own, bytes_.size))
    described = [known for known, _ in by_rank]
    everyone = dict.fromkeys(key for known in described for key in known)
    all_ = {key: meters[key] if key in meters else make() for key in everyone}
    plain = {key: meter for key, meter in all_.items() if not isinstance(meter, TorchMetric)}
    _check(plain, described)
    rows = bytes_.gathered(max(size for _, size in by_rank), backend)
    with ExitStack() as stack:
        stack.enter_context(_added(plain, backend))
        for key, meter in all_.items():
            if isinstance(meter, TorchMetric):
                states = [
                    _states(known[key], row) for known, row in zip(described, rows, strict=True)
                ]
                stack.enter_context(meter.reduced(states, _gather(backend)))
        yield all_


def merge(meters: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Load what the meters of several processes had measured together.

    Args:
        meters: name to meter; each takes its part, or starts clean where no process has one.
        states: name to state, by rank.

    Raises:
        CheckpointError: a metric of torchmetrics has a state that cannot be put together.
    """
    for key, meter in meters.items():
        found = [state[key] for state in states if key in state]
        if not found:
            meter.reset()
        elif isinstance(meter, TorchMetric):
            meter.load_merged(found, key)
        else:
            _load_added(meter, found)


# --- sums ---


def _sums(meter: Any) -> list[tuple[list[int], torch.dtype]]:
    return [(list(tensor.shape), tensor.dtype) for tensor in meter.summed()]


def _check(meters: Mapping[str, Any], described: Sequence[Mapping[str, Any]]) -> None:
    for key, meter in meters.items():
        own = _sums(meter)
        for rank, known in enumerate(described):
            if key in known and known[key] != own:
                raise ConfigError(
                    f"meters.{key}",
                    f"its sums are {own} here and {known[key]} on rank {rank}; they have to be of "
                    f"the same shapes and dtypes on all processes",
                )


@contextmanager
def _added(meters: Mapping[str, Any], backend: Backend) -> Iterator[None]:
    tensors = [tensor for meter in meters.values() for tensor in meter.summed()]
    own = [tensor.clone() for tensor in tensors]
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        _add_over_ranks(alike, backend)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, own, strict=True):
            tensor.copy_(value)


def _add_over_ranks(tensors: Sequence[Tensor], backend: Backend) -> None:
    """Sum each over processes, in place, all in one collective: of one dtype and device."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    if flat.device.type == backend.device.type:
        flat = backend.all_reduce(flat)
    else:  # a meter that keeps its sums on the host
        flat = flat.to(torch.float64 if flat.dtype.is_floating_point else torch.int64)
        backend.total_on_host(flat)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, total in zip(tensors, torch.split(flat, sizes), strict=True):
        tensor.copy_(total.reshape(tensor.shape))


def _load_added(meter: Any, states: Sequence[Any]) -> None:
    """What adds up is the sum over processes; whatever else a meter keeps is that of the first."""
    totals: list[Tensor] = []
    for state in reversed(states):
        meter.load_state_dict(copied(state))
        own = [tensor.clone() for tensor in meter.summed()]
        totals = [a + b for a, b in zip(own, totals, strict=True)] if totals else own
    for tensor, total in zip(meter.summed(), totals, strict=True):
        tensor.copy_(total)


# --- states of torchmetrics ---


@dataclass(frozen=True)
class _Place:
    """Where a tensor is among the bytes of its process."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class _Bytes:
    """The tensors of many states as one piece of memory, each once.

    What is not on the device (of a metric that computes on the CPU; plain Python in a list) is not
    among the bytes: it travels with the description.
    """

    def __init__(self, device: torch.device) -> None:
        self.size = 0
        self._device = device
        self._parts: list[Tensor] = []
        self._places: dict[int, tuple[Tensor, _Place]] = {}  # the tensor too, so that its id lasts

    def described(self, states: Sequence[PartState]) -> list[PartState]:
        """The states with places instead of tensors."""
        return [
            PartState(one.updates, {name: self.put(value) for name, value in one.values.items()})
            for one in states
        ]

    def put(self, value: Any) -> Any:
        """Take in a tensor, or those of a list; what stands for it."""
        if isinstance(value, list):
            return [self.put(one) for one in value]
        if not isinstance(value, Tensor):
            return value
        if value.device.type != self._device.type:
            return value.detach().cpu()
        if id(value) not in self._places:
            whole = value.detach().contiguous()
            # Not reshape(-1): where there is one element, it may leave a stride that view refuses.
            flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
            self._places[id(value)] = (value, _Place(self.size, value.shape, value.dtype))
            self._parts.append(flat)
            self.size += flat.numel()
        return self._places[id(value)][1]

    def gathered(self, size: int, backend: Backend) -> list[Tensor]:
        """The bytes of every process, by rank; ``size`` is the largest number of them."""
        mine = torch.cat([*self._parts, torch.empty(0, dtype=torch.uint8, device=self._device)])
        if size == 0:
            return [mine] * backend.world_size
        padded = torch.nn.functional.pad(mine, (0, size - self.size))
        with torch.no_grad():
            return list(backend.gather_with_grad(padded).reshape(backend.world_size, size))


def _states(described: Sequence[PartState], row: Tensor) -> list[PartState]:
    """The reverse of :meth:`_Bytes.described`, from the bytes of that process."""
    return [
        PartState(state.updates, {name: _get(value, row) for name, value in state.values.items()})
        for state in described
    ]


def _get(value: Any, row: Tensor) -> Any:
    if isinstance(value, list):
        return [_get(one, row) for one in value]
    if not isinstance(value, _Place):
        return value
    size = value.shape.numel() * value.dtype.itemsize
    # Cloned, since bytes in the middle of others need not be aligned for the dtype.
    return row[value.start : value.start + size].clone().view(value.dtype).reshape(value.shape)


def _gather(backend: Backend) -> Callable[..., list[Tensor]]:
    """A function for metrics that sync in their own way: a tensor of every process, by rank."""

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        bytes_ = _Bytes(backend.device)
        by_rank = backend.all_gather_object((bytes_.put(tensor), bytes_.size))
        rows = bytes_.gathered(max(size for _, size in by_rank), backend)
        return [_get(place, row) for (place, _), row in zip(by_rank, rows, strict=True)]

    return gather
