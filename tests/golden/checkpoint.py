"""``python -m tests.golden.checkpoint`` makes the golden checkpoint of this format anew.

A small run is stopped in the middle of an epoch and committed with what its end is like. Make it
anew only while its format is not released; a later format gets a folder of its own, and those
before it stay as they are, for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from tests.golden import machine
from tests.rigs import equal, process

FOLDER = Path(__file__).with_name("checkpoints")
FORMATS = sorted(path.name for path in FOLDER.iterdir())
STOPPED, LAST = 12, 20
"""Updates at which the golden run was stopped, and at its end."""

_NOT_KEPT = ("log.txt", ".lock")  # they name the machine


def command(folder: Path, *words: str) -> int:
    """In a new process: the command line in ``folder``; its exit code."""
    from phaseloop.tools import run

    os.chdir(folder)
    return run.run(["config=golden", *words])


def end_of(folder: Path) -> dict[str, Any]:
    """What a finished run has come to: every number, exactly."""
    checkpoints = store.Store(folder / "run" / "checkpoints")
    saved = store.verified(checkpoints.folder / checkpoints.names()[-1])
    state = store.load(saved, STATE)
    averages = {f"average.{k}": v for k, v in state["averages"]["average"].items()}
    momentum = {
        f"momentum.{name}": values["momentum_buffer"]
        for name, values in state["optimizers"]["optimizer"]["state"].items()
    }
    tensors = {**store.load(saved, MODEL), **averages, **momentum}
    rows = equal.rows(folder / "run")
    return {
        "updates": saved.manifest["updates"],
        "scale": state["scaler"]["scale"],
        "draws": state["hooks"]["golden_counter"]["sum"].hex(),
        "metrics": {name: value.hex() for name, value in sorted(state["metrics"].items())},
        "best": {name: value.hex() for name, value in sorted(state["best"].items())},
        "rows": len(rows),
        "tensors": {
            name: [float(x).hex() for x in tensor.flatten()] for name, tensor in tensors.items()
        },
    }


def make(target: Path) -> None:
    """Run, stop, keep; and run on to say what the end is."""
    configs = FOLDER / f"format_{store.FORMAT}" / "configs"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(configs, folder / "configs")
        assert process.result(command, folder, f"hooks.golden_stop.update={STOPPED}") == 0
        kept = target / "run"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder / "run", kept, ignore=shutil.ignore_patterns(*_NOT_KEPT))
        for name in store.Store(kept / "checkpoints").names()[:-1]:
            shutil.rmtree(kept / "checkpoints" / name)  # the best one; it may be gone
        assert process.result(command, folder) == 0
        expected = {"machine": machine(), "end": end_of(folder)}
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    from tests.golden import checkpoint  # by its name, by which a new process finds it

    checkpoint.make(FOLDER / f"format_{store.FORMAT}")
