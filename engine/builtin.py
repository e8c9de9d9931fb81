"""Torch's own optimizers and losses under short names, as PyTorch's documentation lists them.

Beside torch's optimizers there is LARS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from phaseloop.engine.lars import LARS
from phaseloop.engine.registry import register_criterion, register_optimizer

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "lars": LARS,
}

CRITERIA = {
    "cross_entropy": nn.CrossEntropyLoss,
    "binary_cross_entropy_with_logits": nn.BCEWithLogitsLoss,
    "nll": nn.NLLLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "kl_div": nn.KLDivLoss,
}

for _name, _optimizer in OPTIMIZERS.items():
    register_optimizer(_name)(_optimizer)
for _name, _criterion in CRITERIA.items():
    register_criterion(_name)(_criterion)
