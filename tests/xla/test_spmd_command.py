"""SPMD from the command line: digits over two devices, and what a plan says of them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rigs import cli

WORDS = (
    "config=digits", "backend=xla", "backend.device=cpu", "backend.spmd=true", "backend.devices=2",
    "hooks.tensorboard=null", "hooks.curves=null", "hooks.progress=null",
)  # fmt: skip


def test_digits_over_two_devices(tmp_path: Path) -> None:
    plan = cli.run([*WORDS, "plan=true"], tmp_path, timeout=300)
    assert plan.returncode == 0, plan.stdout + plan.stderr
    assert "device      xla:0 (2 xla:CPU by SPMD), 1 process" in plan.stdout
    done = cli.run(WORDS, tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine     xla:0 (2 xla:CPU by SPMD), 1 thread" in done.stdout
    status = json.loads((tmp_path / "runs" / "digits" / "status.json").read_text())
    assert status["final"]["test/accuracy"] >= 0.98
