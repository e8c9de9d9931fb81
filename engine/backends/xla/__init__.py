"""Backend ``xla``: PyTorch/XLA, on a TPU or the CPU. Nobody but this folder knows the package."""

from phaseloop.engine.backends.xla.replicas import Xla

__all__ = ["Xla"]
