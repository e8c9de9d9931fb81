"""Golden losses: a change that should not alter numbers leaves every loss of digits as it was."""

from __future__ import annotations

import json

import pytest

from tests.golden import FILE, losses, machine


def test_golden_losses_of_digits(tmp_path, capsys):
    recorded = json.loads(FILE.read_text())
    golden = [float.fromhex(loss) for loss in recorded["losses"]]
    now = losses(tmp_path / "run")
    if recorded["machine"] == machine():
        how = "to the bit: this machine is as the recorded one"
        assert now == golden, f"compared {how}"
    else:
        how = f"to 1e-5: recorded on {recorded['machine']}, this is {machine()}"
        assert now == pytest.approx(golden, rel=1e-5), f"compared {how}"
    with capsys.disabled():
        print(f"\ngolden losses compared {how}")
