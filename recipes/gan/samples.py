"""The hook `samples`: a picture of generated images after each test."""

from typing import Any

import torch

from phaseloop import Hook, Task, image_grid, register_hook

from .data import NOISE


@register_hook("samples")
class Samples(Hook):
    """At the end of a test phase, images of the generator that was tested, always of one noise.

    Args:
        rows, columns: how many.
        seed: of the noise, which comes from a generator of its own.
    """

    only_watches = True

    def __init__(self, rows: int = 6, columns: int = 12, seed: int = 0) -> None:
        if rows < 1 or columns < 1:
            raise ValueError(f"{rows} rows of {columns} images are none")
        self.columns = columns
        own = torch.Generator().manual_seed(seed)
        self.noise = torch.randn(rows * columns, NOISE, generator=own)

    def on_phase_end(self, task: Task) -> None:
        if task.train:
            return
        # The averaged weights, where these were tested, are in the model until the phase is left.
        model: Any = task.bare_model
        images = task.compute(model.generator, self.noise.to(task.device))
        task.record_image(f"{task.phase.name}/samples", image_grid(images, self.columns, scale=4))
