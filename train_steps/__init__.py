"""Train steps: one a file, registered by name."""

if not __name__.startswith("phaseloop."):
    raise ImportError("import phaseloop.train_steps, not train_steps")

from phaseloop.train_steps.alternating import Alternating
from phaseloop.train_steps.closure import closure_train_step
from phaseloop.train_steps.contrastive import contrastive_train_step
from phaseloop.train_steps.extract import Extract
from phaseloop.train_steps.standard import standard_train_step
from phaseloop.train_steps.tbptt import TruncatedBackpropagation

__all__ = [
    "Alternating",
    "Extract",
    "TruncatedBackpropagation",
    "closure_train_step",
    "contrastive_train_step",
    "standard_train_step",
]
