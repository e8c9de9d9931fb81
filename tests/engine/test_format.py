"""Format 1 stays readable for ever: a checkpoint of the first version is kept here.

It is of R1 with Adam, stopped after 7 of 10 updates of its first epoch (``tests/rigs/r1.py``). Do
not make it anew: a test that fails here says that users' checkpoints cannot be read any more.
"""

from __future__ import annotations

from pathlib import Path

import torch

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from tests.rigs import r1

KEPT = Path(__file__).parent / "format_1" / store.folder_name(7, 1)


def test_it_is_verified_and_read() -> None:
    saved = store.verified(KEPT)
    assert saved.manifest["format"] == 1 and saved.position == (7, 1)
    model, state = store.load(saved, MODEL), store.load(saved, STATE)
    shapes = {name: value.shape for name, value in r1.network().state_dict().items()}
    assert {name: value.shape for name, value in model.items()} == shapes
    moments = state["optimizers"]["optimizer"]["state"]
    assert {name: int(moments[name]["step"]) for name in moments} == dict.fromkeys(shapes, 7)
    assert state["progress"]["updates"] == 7


def test_a_run_goes_on_from_it(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    ended = r1.train(
        tmp_path / "run", probe, epochs=2, optimizer_name="adam", run={"resume": str(KEPT)}
    )
    assert ended["status"] == "finished" and ended["updates"] == 20
    lines = r1.lines(probe, "update")
    assert [line["update"] for line in lines] == list(range(8, 21))
    first_epoch = [index for line in lines[:3] for index in line["ids"]]
    assert len(set(first_epoch)) == 12  # its last three batches of four
    before, after = (
        store.load(store.verified(path), MODEL)
        for path in (KEPT, next((tmp_path / "run" / "checkpoints").iterdir()))
    )
    assert not any(torch.equal(before[name], after[name]) for name in before)
