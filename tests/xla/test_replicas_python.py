"""Replicas that a script starts by ``torch_xla.launch``: what they print, and of what they fail."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Task, Trainer, Xla
from phaseloop.engine.errors import ConfigError
from tests.rigs import r1, replicas

SOON = 20.0
"""Seconds from one replica's failure to the end of all; waits have 300."""


class Fault(Hook):
    """Rank 1 fails behind the second update."""

    def on_step(self, task: Task) -> None:
        if task.backend.rank == 1 and task.progress.updates == 2:
            raise ValueError(f"planted at {time.time()}")


def fails() -> None:
    task = r1.make_task(None, epochs=2, backend=Xla("cpu"))
    Trainer(task, {"fault": Fault()}).train()


def refuses(module: nn.Module, criterion: nn.Module | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        r1.make_task(
            None, epochs=1, model=nn.Sequential(nn.Linear(4, 2), module), backend=Xla("cpu"),
            **({} if criterion is None else {"criterion": criterion}),
        )  # fmt: skip
    return str(caught.value)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(2)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.norm(output), target)


def warns() -> None:
    """One sample in a batch is less than one for each replica: a line that says so."""
    task = r1.make_task(None, epochs=1, train=Data(r1.Samples(2), 1), backend=Xla("cpu"))
    Trainer(task, {}).train()


def speaks() -> dict[str, Any]:
    """What goes round on the host, and that nothing of one is another's."""
    backend = Xla("cpu")
    backend.setup()
    rank = backend.rank
    mine = {"rank": [rank]}
    everywhere = backend.all_gather_object(mine)
    everywhere[1 - rank]["rank"].append("changed")
    first, second = torch.tensor([1.0 + rank]), torch.tensor([10.0 * rank])
    later, sooner = backend.sum_on_host(first), backend.sum_on_host(second)
    assert later is not None and sooner is not None
    sooner.wait()
    later.wait()
    backend.barrier()
    found = {
        "everywhere": everywhere[rank], "mine": mine, "sums": [float(first), float(second)],
        "gathered": backend.gather_object(rank), "sent": backend.broadcast_object(f"of {rank}"),
        "same": [backend.same(5), backend.same(rank)],
        "kept": len(backend._lockstep._posts),  # type: ignore[union-attr]
    }  # fmt: skip
    backend.barrier()
    backend.teardown()
    return found


def all_of_it(folder: str) -> None:
    import pickle
    from pathlib import Path

    warns()
    found = {
        "model": refuses(nn.SyncBatchNorm(2)),
        "criterion": refuses(nn.Identity(), Loss()),
        "spoken": speaks(),
    }
    (Path(folder) / f"found.{replicas.rank()}").write_bytes(pickle.dumps(found))
    fails()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By rank what they found, and how the process ended: at last rank 1 fails."""
    import pickle

    folder = tmp_path_factory.mktemp("python")
    ended = replicas.run(all_of_it, str(folder))
    at = time.time()
    files = [folder / f"found.{rank}" for rank in (0, 1)]
    assert all(file.exists() for file in files), ended.output
    return [pickle.loads(file.read_bytes()) for file in files], ended, at


def test_exc_b_the_first_cause_comes_out_of_each(done: Any) -> None:
    _, ended, at = done
    assert ended.code != 0
    # What the launch raises is rank 0's error: it follows from rank 1's, and says so.
    last = [line for line in ended.output.splitlines() if line][-1]
    assert "PeerError: rank 1: ValueError: planted at " in last, ended.output
    assert "\nValueError: planted at " in ended.output  # with its traceback
    assert at - float(last.rsplit(" ", 1)[1]) < SOON


def test_sync_batch_norm_is_refused(done: Any) -> None:
    for found in done[0]:
        assert found["model"].startswith("model: 1 is a SyncBatchNorm")
        assert found["criterion"].startswith("model: norm is a SyncBatchNorm")
        assert "backend.spmd=true" in found["model"]


def test_ddp_g_a_line_is_printed_once_and_nothing_of_others(done: Any) -> None:
    output = done[1].output
    assert output.count("data.train: batch_size 1 is less than the 2 processes") == 1, output
    assert "[Gloo]" not in output


def test_what_replicas_say_to_one_another(done: Any) -> None:
    first, second = (found["spoken"] for found in done[0])
    for rank, found in enumerate((first, second)):
        assert found["everywhere"] == found["mine"] == {"rank": [rank]}
        assert found["sums"] == [3.0, 10.0]
        assert found["sent"] == "of 0"
        assert found["same"] == [True, False]
        assert found["kept"] <= 2  # of the last sum, where the other has not taken it yet
    assert (first["gathered"], second["gathered"]) == ([0, 1], [None, 1])
