"""Meter ``probe``: the probes over the features of a whole test phase, on all processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from phaseloop import ConfigError, register_meter

from .data import BANK, QUERY
from .functions import FewLabel, Labelled, Linear, Neighbours

PROBES = {"linear": Linear, "few_label": FewLabel, "knn": Neighbours}

_LINEAR, _FEW_LABEL, _KNN = Linear(), FewLabel(), Neighbours()


@register_meter("probe")
class Probe(Metric):
    """Accuracies, 0 to 1, of the probes: ``linear``, ``few_label`` and ``knn``.

    For a test phase whose output are features [B, D], and whose targets are int64 [B, 3] as
    :class:`~phaseloop.recipes.probes.data.ProbeSet` makes them. Features of all samples are kept
    until the phase is read: N * D float32.

    Args:
        linear, few_label, knn: options of the probe, or the probe itself; null leaves it out.

    Raises:
        ConfigError: no probe is left, or an option of one is out of range.
    """

    is_differentiable = False
    full_state_update = False

    features: list[Tensor]
    targets: list[Tensor]

    def __init__(
        self,
        linear: Linear | None = _LINEAR,
        few_label: FewLabel | None = _FEW_LABEL,
        knn: Neighbours | None = _KNN,
    ) -> None:
        super().__init__()
        given = {"linear": linear, "few_label": few_label, "knn": knn}
        self.probes = {
            name: _made(name, value) for name, value in given.items() if value is not None
        }
        if not self.probes:
            raise ConfigError("probe", f"none is left of {', '.join(given)}")
        self.add_state("features", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    @property
    def higher_is_better(self) -> dict[str, bool]:  # type: ignore[override]
        """Of the probes that are measured: the names are the metrics that can be asked for."""
        return dict.fromkeys(self.probes, True)

    def update(self, features: Tensor, target: Tensor) -> None:
        """Keep the features [B, D] of a batch with their targets int64 [B, 3]."""
        if target.dim() != 2 or target.shape[1] != 3:
            raise ConfigError(
                "probe",
                f"targets are {list(target.shape)}, but must be [B, 3]: label, part and position, "
                f"as the dataset probe_set makes them",
            )
        if not isinstance(features, Tensor) or len(features) != len(target):
            shown = list(features.shape) if isinstance(features, Tensor) else type(features)
            raise ConfigError("probe", f"features are {shown}, but must be [{len(target)}, D]")
        self.features.append(features.float())
        self.targets.append(target)

    def compute(self) -> dict[str, float]:
        """Name of each probe to its accuracy."""
        if len(self.features) == 0:  # a list, or, of several processes, one tensor
            return dict.fromkeys(self.probes, float("nan"))
        features, targets = dim_zero_cat(self.features), dim_zero_cat(self.targets)
        order = targets[:, 2].argsort()  # however the samples came, and from whichever process
        features, targets = features[order], targets[order]
        bank, queries = (self._part(features, targets, part) for part in (BANK, QUERY))
        found = {}
        for name, probe in self.probes.items():
            try:
                found[name] = probe(bank, queries)
            except ValueError as error:
                raise ConfigError(f"probe.{name}", str(error)) from error
        return found

    def _part(self, features: Tensor, targets: Tensor, part: int) -> Labelled:
        mine = targets[:, 1] == part
        if not bool(mine.any()):
            name = "queries" if part == QUERY else "bank"
            raise ConfigError("probe", f"there is no sample of the {name} in the test set")
        return Labelled(features[mine], targets[mine, 0])


def _made(name: str, given: Any) -> Any:
    kind = PROBES[name]
    if isinstance(given, kind):
        return given
    options = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"probe.{name}",
            f"{given!r} is neither a mapping of its options ({', '.join(options)}) nor null",
        )
    for option in given:
        if option not in options:
            raise ConfigError(
                f"probe.{name}.{option}",
                f"there is no such option. There are: {', '.join(options)}",
            )
    try:
        return kind(**given)
    except ValueError as error:
        raise ConfigError(f"probe.{name}", str(error)) from error
