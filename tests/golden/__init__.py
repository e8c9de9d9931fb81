"""Golden losses: the first two epochs of digits, written down to notice a change of numbers.

Record them anew only for a change that is meant to alter numbers, and say why in its commit:
``python -m tests.golden``.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from phaseloop.tools.run import run

FILE = Path(__file__).with_name("digits.json")
OVERRIDES = (
    "config=digits", "phases.epochs=2", "run.log_every=1", "run.threads=1", "seed=0",
    "hooks.console=null", "hooks.progress=null", "hooks.tensorboard=null", "hooks.curves=null",
)  # fmt: skip


def losses(folder: Path) -> list[float]:
    """The loss of each update of the first two epochs, trained in ``folder``."""
    code = run([*OVERRIDES, f"run.dir={folder}"])
    assert code == 0
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def machine() -> dict[str, Any]:
    """What the last bits depend on."""
    return {
        "torch": torch.__version__,
        "threads": 1,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


def _processor() -> str:
    """The maker of the processor: torch's libraries choose their kernels by it too."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
