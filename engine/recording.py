"""Recording: what a step or a hook says about the training, for others to write down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phaseloop.engine.errors import PhaseloopError
from phaseloop.engine.stepping import scalar

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class Recording:
    """The part of a task that takes in numbers, pictures, histograms and texts."""

    def record(self: Task, name: str, value: Tensor | float, weight: float = 1.0) -> None:  # type: ignore[misc]
        """Log a scalar: the mean since the last log point, weighted.

        A tensor stays on the device until the log point; a tensor with a graph is detached.

        Raises:
            ConfigError: the tensor has more than one element.
        """
        if isinstance(value, Tensor):
            self.recorder.add(name, scalar(value, f"record({name!r})"), weight)
        else:
            device = None if self.backend.lazy else self.device
            self.recorder.add(name, torch.full((), float(value), device=device), weight)

    def record_image(self: Task, name: str, image: Tensor) -> None:  # type: ignore[misc]
        """Have a picture written, by TensorBoard and as a PNG; of several processes the primary's.

        One of a train step belongs to its update, and is written when that is counted; where it is
        left out, so is the picture. One from outside a step is written at once. Of two with one
        name at one update the later stands.

        Args:
            name: letters, digits, ``_``, ``-``, ``.``, and ``/`` between parts.
            image: [C, H, W], C 1 (grey) or 3 (red, green, blue); floating point from 0 to 1, what
                lies beyond is cut off; or uint8. It is copied; the device is waited for when it is
                written.

        Raises:
            ConfigError: the name or the image is of another kind.
            PhaseloopError: called before the first phase has begun.
        """
        self._check_begun("record_image")
        self.shown.add_image(name, image, self.backend.lazy)
        self._show()

    def record_histogram(self: Task, name: str, tensor: Tensor) -> None:  # type: ignore[misc]
        """Have the spread of a tensor's finite values written, by TensorBoard.

        When it is written is as for :meth:`record_image`. It is counted on the device, in 64
        intervals; where nobody writes it, it is not. Of several processes the primary's is
        written; of a sharded tensor that of the whole, and all of them have to call this.

        Args:
            name: any.
            tensor: of any shape, real; of a sparse one the values that it holds.

        Raises:
            ConfigError: not a tensor of real numbers, or no name.
            PhaseloopError: called before the first phase has begun.
        """
        self._check_begun("record_histogram")
        self.shown.add_histogram(name, tensor, self.backend.lazy)
        self._show()

    def record_text(self: Task, name: str, text: str) -> None:  # type: ignore[misc]
        """Have a text written, by TensorBoard; when and whose is as for :meth:`record_image`.

        Args:
            name: any.
            text: Markdown.

        Raises:
            ConfigError: no text, or no name.
            PhaseloopError: called before the first phase has begun.
        """
        self._check_begun("record_text")
        self.shown.add_text(name, text)
        self._show()

    def _check_begun(self: Task, method: str) -> None:  # type: ignore[misc]
        if self.running_status is None:
            raise PhaseloopError(
                f"{method}() has its first place at on_phase_start: before it a run does not "
                "know yet what has been written"
            )

    def _show(self: Task) -> None:  # type: ignore[misc]
        """What belongs to no window goes to those who write it."""
        if self.shown.waiting and self.accumulator.closed:
            self.shown.give(self.progress.updates, self.backend)
