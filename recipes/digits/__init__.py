"""Handwritten digits, 8x8: importing this package registers its dataset and its model."""

from .data import Digits
from .model import DigitsCNN

__all__ = ["Digits", "DigitsCNN"]
