"""Self-supervised learning: importing this package registers its model and its losses."""

from .losses import NTXent, VICReg
from .model import SSLNetwork
from .teacher import BYOL, MoCo, TeacherNetwork

__all__ = ["BYOL", "MoCo", "NTXent", "SSLNetwork", "TeacherNetwork", "VICReg"]
