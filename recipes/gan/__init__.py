"""A generative adversarial network on the digits: importing this package registers its parts."""

from .data import NOISE, DigitsAndNoise
from .frechet import Frechet, Judge
from .losses import HingeLosses
from .model import DigitsGAN
from .samples import Samples

__all__ = ["NOISE", "DigitsAndNoise", "DigitsGAN", "Frechet", "HingeLosses", "Judge", "Samples"]
