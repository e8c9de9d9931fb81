"""Fine-tuning with a few labels of each class: importing this package registers their dataset."""

from .data import FewLabels

__all__ = ["FewLabels"]
