"""Looking at tensors: what of them is not finite, where they are, and the line at work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import phaseloop
from phaseloop.engine.data.batch import Batch

_OWN = (
    os.path.dirname(os.path.abspath(torch.__file__)),
    *(str(Path(str(phaseloop.__file__)).resolve().parent.parent / name)
      for name in ("engine", "tools", "hooks", "train_steps", "phaseloop")),
)  # fmt: skip


def state_of(tensor: Tensor) -> tuple[bool, bool]:
    """Whether there is a NaN in it, and an infinity. Here the host waits for the device."""
    values = values_of(tensor)
    if values is None or bool(torch.isfinite(values).all()):
        return False, False
    return bool(torch.isnan(values).any()), bool(torch.isinf(values).any())


def values_of(tensor: Tensor) -> Tensor | None:
    """Its numbers; None: it has none that could be other than finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return None
    if tensor.layout != torch.strided:
        return tensor.detach().coalesce().values() if tensor.layout == torch.sparse_coo else None
    values = tensor.detach()
    return values.float() if values.element_size() == 1 else values


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def bad_rows(tensor: Tensor, batch: Batch | None) -> list[int] | None:
    """Rows that are not finite, where there is a row for each sample."""
    values = values_of(tensor)
    if batch is None or values is None or values.dim() == 0 or len(values) != batch.size:
        return None
    found: list[int] = (
        (~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero().flatten().tolist()
    )
    return found


def count_bad(tensors: list[Tensor]) -> str:
    nan = inf = total = 0
    for tensor in tensors:
        values = values_of(tensor)
        if values is not None:
            nan += int(torch.isnan(values).sum())
            inf += int(torch.isinf(values).sum())
            total += values.numel()
    return count_of(nan, inf, total)


def count_of(nan: int, inf: int, total: int) -> str:
    """How many of how many, in words."""
    parts = [f"{nan} NaN"] * (nan > 0) + [f"{inf} infinite"] * (inf > 0)
    return (
        f"{' and '.join(parts)} of {total} elements"
        if total > 1
        else ("NaN" if nan else "an infinity")
    )


def shapes_of(tensors: list[Tensor]) -> str:
    shown = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors[:4]]
    return ", ".join([*shown, *["..."] * (len(tensors) > 4)])


def line_of(frames: list[str]) -> str:
    """The innermost line outside torch and this package, of frames as traceback formats them."""
    for frame in reversed(frames):
        first, *rest = frame.strip().splitlines()
        parts = first.split('"')
        if len(parts) < 3 or parts[1].startswith("<"):
            continue
        file = os.path.realpath(parts[1])
        if file.startswith(_OWN) or "/torch/" in file:
            continue
        number = parts[2].split("line ")[-1].split(",")[0]
        function = parts[2].split(" in ")[-1].strip()
        code = rest[0].strip() if rest else ""
        here = os.path.realpath(os.getcwd()) + os.sep
        return f"{file.removeprefix(here)}:{number} in {function}: {code}".rstrip(": ")
    return ""
