"""Optimizer state by parameter name.

torch's own ``state_dict`` numbers parameters by position, so that a model whose layers are listed
in another order takes another layer's momentum in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phaseloop.engine.errors import CheckpointError, PhaseloopError
from phaseloop.engine.shards import is_shard, share_of


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """``id`` of every parameter to its name.

    Args:
        modules: prefix to module; an empty prefix gives the module's own names.
    """
    names: dict[int, str] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
    return names


def check_names(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Raises PhaseloopError for a parameter of the optimizer that has no name."""
    for number, group in enumerate(optimizer.param_groups):
        _names_of(group, number, names)


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """State and group options of ``optimizer`` with names for parameters.

    Raises:
        PhaseloopError: the optimizer holds a parameter that has no name.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": _names_of(group, number, names)})
    state = {names[id(parameter)]: dict(entry) for parameter, entry in optimizer.state.items()}
    return {"state": state, "groups": groups}


def load_named_state(
    optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any], label: str
) -> None:
    """Give ``optimizer`` the state that :func:`named_state` took, matched by name.

    Args:
        label: the optimizer's name, for messages.

    Raises:
        CheckpointError: a group of the optimizer has no group of the same parameters in the
            checkpoint; the message names what differs.
    """
    by_names = {frozenset(group["params"]): group for group in saved["groups"]}
    states = _shares(optimizer, names, saved["state"])
    groups, state, position = [], {}, 0
    for number, group in enumerate(optimizer.param_groups):
        here = _names_of(group, number, names)
        found = by_names.get(frozenset(here))
        if found is None:
            raise CheckpointError(_no_such_group(label, number, here, saved))
        options = {key: value for key, value in group.items() if key != "params"}
        options.update({key: value for key, value in found.items() if key != "params"})
        positions = list(range(position, position + len(here)))
        groups.append({**options, "params": positions})
        for index, name in zip(positions, here, strict=True):
            if name in states:
                state[index] = states[name]
        position += len(here)
    if len(by_names) != len(groups):
        raise CheckpointError(
            f"{label}: the checkpoint has {len(by_names)} parameter groups, "
            f"this optimizer has {len(groups)}"
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _keep_types(optimizer, names, states)


def _shares(
    optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    """This process's part of what is as large as a parameter that is sharded."""
    sharded = {
        names[id(parameter)]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if is_shard(parameter) and id(parameter) in names
    }
    return {
        name: entry
        if name not in sharded
        else {key: share_of(value, sharded[name]) for key, value in entry.items()}
        for name, entry in saved.items()
    }


def _keep_types(
    optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """torch converts all state to the parameter's type; what had another keeps it, and its bits."""
    for parameter, entry in optimizer.state.items():
        for key, value in saved[names[id(parameter)]].items():
            here = entry.get(key)
            if isinstance(value, Tensor) and isinstance(here, Tensor) and here.dtype != value.dtype:
                entry[key] = value.to(here.device)


def _names_of(group: Mapping[str, Any], number: int, names: Mapping[int, str]) -> list[str]:
    try:
        return [names[id(parameter)] for parameter in group["params"]]
    except KeyError:
        raise PhaseloopError(
            f"optimizer group {number} holds a parameter that belongs neither to the model nor "
            f"to the criterion; it could not be found again in a checkpoint"
        ) from None


def _no_such_group(label: str, number: int, here: list[str], saved: Mapping[str, Any]) -> str:
    there = {name for group in saved["groups"] for name in group["params"]}
    missing = sorted(set(here) - there)
    unused = sorted(there - set(here))
    return (
        f"{label}: group {number} does not match the checkpoint. "
        f"Only here: {', '.join(missing) or 'none'}. "
        f"Only in the checkpoint: {', '.join(unused) or 'none'}."
    )
