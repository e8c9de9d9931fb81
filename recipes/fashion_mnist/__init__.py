"""Fashion-MNIST, 28x28: importing this package registers its dataset and its models."""

from .data import CLASSES, FashionMNIST
from .model import FashionCNN, FashionMLP

__all__ = ["CLASSES", "FashionCNN", "FashionMLP", "FashionMNIST"]
