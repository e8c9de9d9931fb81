"""Diabetes, a regression on a table: importing this package registers its data, model and loss."""

from .data import Diabetes
from .model import StandardMSE, TabularMLP

__all__ = ["Diabetes", "StandardMSE", "TabularMLP"]
