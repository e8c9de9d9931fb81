"""Batch and instance norm on XLA: the running variance is the unbiased one, as everywhere else.

torch_xla 2.9 moves it by the variance over n values per channel, torch by n / (n - 1) times that
(Bessel's correction); an instance norm by the mean of that over samples. A model that was trained
there would measure otherwise in a test.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle


def correct(model: nn.Module) -> list[RemovableHandle]:
    """From here on running variances are what torch's are; until these handles are removed."""
    handles = []
    for module in model.modules():
        if isinstance(module, _BatchNorm | _InstanceNorm) and module.track_running_stats:
            hooks = _Correction(of_samples=isinstance(module, _InstanceNorm))
            handles.append(module.register_forward_pre_hook(hooks.before))
            handles.append(module.register_forward_hook(hooks.after))
    return handles


class _Correction:
    """Of one norm.

    With momentum m, variances v before, v' after and b of the batch, v' = (1 - m) v + m b, and is
    to be (1 - m) v + m b n / (n - 1), which is v' + (v' - (1 - m) v) / (n - 1).

    Args:
        of_samples: b is the mean of the samples' own variances.
    """

    def __init__(self, of_samples: bool) -> None:
        self._of_samples = of_samples
        self._variance: Tensor | None = None

    def before(self, module: Any, args: Any) -> None:
        moves = module.training and module.running_var is not None
        self._variance = module.running_var.clone() if moves else None

    def after(self, module: Any, args: Any, output: Tensor) -> None:
        if self._variance is None:
            return
        old, new, self._variance = self._variance, module.running_var, None
        momentum = module.momentum
        if momentum is None and self._of_samples:
            return  # for an instance norm that is 0: nothing has moved
        if momentum is None:  # the mean over all batches
            momentum = 1.0 / module.num_batches_tracked.to(new.dtype)
        values = output.numel() // output.shape[1]
        if self._of_samples:  # also of one that comes without a batch
            values = math.prod(output.shape[1 - module._get_no_batch_dim() :])
        # By its data: autograd keeps this tensor, though in training it makes no use of it.
        new.data.add_((new - (1 - momentum) * old) / (values - 1))
