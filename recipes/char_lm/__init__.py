"""Models of the next character of a text: importing this registers data, models, loss and meter."""

from .data import CharLanes, CharWindows
from .measure import BitsPerCharacter, CharCrossEntropy
from .model import CharGRU, CharTransformer

__all__ = [
    "BitsPerCharacter",
    "CharCrossEntropy",
    "CharGRU",
    "CharLanes",
    "CharTransformer",
    "CharWindows",
]
