"""Probes of frozen features: importing this package registers the meter and its dataset."""

from .data import ProbeSet
from .functions import FewLabel, Labelled, Linear, Neighbours
from .meter import Probe

__all__ = ["FewLabel", "Labelled", "Linear", "Neighbours", "Probe", "ProbeSet"]
