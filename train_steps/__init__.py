"""Train steps: one a file, registered by name."""

if not __name__.startswith("phaseloop."):
    raise ImportError("import phaseloop.train_steps, not train_steps")

from phaseloop.train_steps.standard import standard_train_step

__all__ = ["standard_train_step"]
