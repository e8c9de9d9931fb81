"""Accumulator: what has been done in the window at hand, and how each loss has to be weighted."""

from __future__ import annotations

import torch
from torch import Tensor

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import PhaseloopError


class Accumulator:
    """The state of one window.

    A loss is the mean over its micro-batch's samples (or over the weight that the step gives).
    The batch's mean is sum(n_i * mean_i) / sum(n_i): so a loss is multiplied by n_i over the
    batch's samples before backward, and by nothing when that is 1. With explicit weights the sum
    is known only at the window's end, and the gradients are divided once then.

    On a lazy device a factor is a tensor there, and 1 is one too: a number would be a part of the
    program, which would then be another for each, and on some processes only.

    A step that takes whole windows may go through one several times; each pass is weighted for
    itself.

    Args:
        world_size: processes.
        lazy: the device, where it is a lazy one.

    Attributes:
        taken: micro-batches of the window that were handed out or found empty.
        closed: no window is open.
        applied: the window's update was made, or skipped.
        spent: the gradients added so far were used: the next loss begins another pass.
        explicit_weight: sum of the weights that the step gave since the pass began; None: it gave
            none.
    """

    def __init__(self, world_size: int, lazy: torch.device | None = None) -> None:
        self._world_size = world_size
        self._lazy = lazy
        self.begin(Window((), 0, 0))
        self.closed = True

    def begin(self, window: Window) -> None:
        """Start a window; nothing of the one before is kept."""
        self.closed = False
        self.window = window
        self.taken = 0
        self.applied = False
        self.begin_pass()

    def begin_pass(self) -> None:
        """Start to weigh anew: what comes now makes a mean of its own."""
        self._contributed = 0
        self._last: Batch | None = None
        self.explicit_weight: Tensor | float | None = None
        self.spent = False

    @property
    def full(self) -> bool:
        """Every micro-batch of the window was taken."""
        return self.taken == len(self.window.pieces)

    @property
    def has_gradients(self) -> bool:
        """At least one backward was run whose gradients were not used yet."""
        return self._last is not None and not self.spent

    @property
    def lacks(self) -> int:
        """Samples of this process's share that no loss was made of since the pass began."""
        return self.window.share - self._contributed

    @property
    def is_weighted(self) -> bool:
        """There are gradients that still have to be divided by a sum of weights."""
        return self.has_gradients and self.explicit_weight is not None

    def weigh(self, loss: Tensor, batch: Batch, weight: Tensor | float | None) -> Tensor:
        """The loss as backward has to see it.

        Args:
            loss: mean loss of the micro-batch, one element.
            batch: the micro-batch; how many of its samples count is known from the plan.
            weight: what the loss is a mean over, where it is not over samples.

        Raises:
            PhaseloopError: some losses of one window have a weight and others have none, or one
                micro-batch has several losses with weights.
        """
        if self.spent:
            self.begin_pass()
        if self._last is not None and (weight is None) != (self.explicit_weight is None):
            raise PhaseloopError(_MIXED)
        if self._last is not batch:  # a step may call backward for several parts of a loss
            self._last = batch
            self._contributed += batch.weight
        elif weight is not None:
            raise PhaseloopError(_TWICE)
        if weight is None:
            total = self.window.samples
            weight = batch.weight * self._world_size  # what follows is a mean over processes
            if self._lazy is not None:
                return loss * self._number(weight / total, loss)
            return loss if weight == total else loss * (weight / total)
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        if self._lazy is not None and not isinstance(weight, Tensor):
            weight = self._number(weight, loss)
        if not batch.weight:
            weight = weight * 0  # a stand-in: its samples count on another process
        self.explicit_weight = (
            weight if self.explicit_weight is None else self.explicit_weight + weight
        )
        return loss * weight

    def _number(self, value: float, like: Tensor) -> Tensor:
        """On the lazy device, as data."""
        return torch.tensor(value, dtype=like.dtype).to(self._lazy)

    def correction(self, weight: Tensor | float | None) -> Tensor | float | None:
        """What every gradient has to be multiplied by at a pass's end; None: nothing.

        With explicit weights, one over their sum (over the mean of it, of several processes).
        Otherwise more than 1 only where samples had no part in the window, because the collate
        function or the step gave nothing for them.

        Args:
            weight: :attr:`explicit_weight`, of all processes.
        """
        if weight is not None:
            if isinstance(weight, Tensor):
                # A window without a valid element has gradients of zero, not 0 / 0.
                weights = weight.double()  # else the quotient of float64 is a float32's
                return torch.where(weights == 0, 1.0, self._world_size / weights)
            return 1.0 / weight if weight else None
        if 0 < self._contributed < self.window.share:
            return self.window.share / self._contributed
        return None


_MIXED = (
    "backward(loss, weight=...) and backward(loss) were both used in one window; "
    "give every micro-batch of a window a weight, or none"
)
_TWICE = (
    "backward(loss, weight=...) was called twice for one micro-batch, and two weights have no one "
    "mean; add the parts of the loss, and call it once"
)
