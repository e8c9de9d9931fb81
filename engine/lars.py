"""LARS: SGD whose every layer moves by a rate in proportion to the size of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phaseloop.engine.errors import ConfigError


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling.

    For each parameter w with gradient g, where c is ``trust`` and b the weight decay::

        local = c * |w| / (|g| + b * |w| + eps)
        v = momentum * v + lr * local * (g + b * w)
        w = w - v

    With ``nesterov`` the last line is w = w - (momentum * v + lr * local * (g + b * w)). With
    ``clip`` (LARC) lr * local is min(local, lr), so that no layer moves faster than plain SGD.
    Where ``|w|`` or ``|g|`` is 0, local is 1. Parameters of one dimension or none, biases and norms, take
    part as in plain SGD without weight decay: local is 1 and b is 0.

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017,
    algorithm 1. The rate is inside the momentum there, unlike in torch's SGD.

    Args:
        params: parameters or groups of them.
        lr: the rate.
        momentum: share of the movement before.
        weight_decay: b.
        trust: c, how far a layer may move in relation to its size.
        eps: keeps the denominator above 0.
        nesterov: look ahead by the momentum.
        clip: LARC.
        exclude_1d: False: parameters of one dimension are treated as all others.

    Raises:
        ConfigError: an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        clip: bool = False,
        exclude_1d: bool = True,
    ) -> None:
        options = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust,
            "eps": eps, "nesterov": nesterov, "clip": clip, "exclude_1d": exclude_1d,
        }  # fmt: skip
        for name in ("lr", "momentum", "weight_decay", "trust", "eps"):
            if not options[name] >= 0:
                raise ConfigError(f"optimizer.{name}", f"{options[name]} is less than 0")
        if nesterov and momentum == 0:
            raise ConfigError("optimizer.nesterov", "needs a momentum above 0")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; nothing is read from the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            plain: list[Tensor] = []
            adapted: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["exclude_1d"] and parameter.dim() <= 1:
                    plain.append(parameter)
                else:
                    kind = parameter.device, parameter.dtype
                    adapted.setdefault(kind, []).append(parameter)
            if plain:
                steps = torch._foreach_mul([_gradient(p) for p in plain], group["lr"])
                self._move(group, plain, list(steps))
            for parameters in adapted.values():
                self._move(group, parameters, self._adapted(group, parameters))
        return loss

    def _adapted(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """lr * local * (g + b * w) of every parameter."""
        lr, decay = group["lr"], group["weight_decay"]
        gradients = [_gradient(parameter) for parameter in parameters]
        sizes = torch.stack(torch._foreach_norm(parameters))
        slopes = torch.stack(torch._foreach_norm(gradients))
        local = group["trust"] * sizes / (slopes + decay * sizes + group["eps"])
        rates = local.clamp(max=lr) if group["clip"] else lr * local
        rates = torch.where((sizes > 0) & (slopes > 0), rates, lr)
        steps = torch._foreach_add(gradients, parameters, alpha=decay)
        torch._foreach_mul_(steps, rates.unbind())
        return list(steps)

    def _move(self, group: dict[str, Any], parameters: list[Tensor], steps: list[Tensor]) -> None:
        momentum = group["momentum"]
        if momentum:
            buffers = []
            for parameter in parameters:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffers.append(state["momentum_buffer"])
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, steps)
            if group["nesterov"]:
                torch._foreach_add_(steps, buffers, alpha=momentum)
            else:
                steps = buffers
        torch._foreach_sub_(parameters, steps)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ConfigError("optimizer", "LARS takes no sparse gradients")
    return gradient
