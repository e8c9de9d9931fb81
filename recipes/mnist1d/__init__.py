"""MNIST-1D, digits as short signals: importing this package registers its dataset and its model."""

from .data import Mnist1D
from .model import Mnist1DCNN

__all__ = ["Mnist1D", "Mnist1DCNN"]
