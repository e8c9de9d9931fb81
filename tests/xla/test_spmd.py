"""SPMD: two XLA devices in one process compute what one does, whatever a batch looks like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phaseloop import Accuracy, ConfigError, Data, Hook, Phases, Task, TensorData, Trainer
from phaseloop.engine.backends import Xla
from phaseloop.engine.precision import Precision
from tests.rigs import spmd

SAMPLES = 21
"""In batches of 8: two whole ones and one of 5, which two devices cannot share evenly."""


class Network(nn.Module):
    """With batch norm, and dropout where it is asked for; takes its input out of a nested batch."""

    def __init__(self, dropout: float = 0.0, norm: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Tanh()]
            self.layers = nn.Sequential(*layers, nn.Linear(8, 3))
        if not norm:
            self.layers[1] = nn.Identity()

    def forward(self, given: Any) -> Tensor:
        if isinstance(given, Tensor):
            return self.layers(given)
        assert given["name"] == "a batch"
        # A matrix that has no samples in it, with fewer rows than there are devices.
        x = given["pair"][0] @ given["eye"] + given["pair"][1] @ given["row"].mT @ given["row"]
        return self.layers(x * given["scale"])


def nested(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """A batch with tensors of no dimension, and of one that is not the samples'."""
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    given = {
        "pair": [x, x / 2],
        "eye": torch.eye(6),
        "row": torch.full((1, 6), 0.1),
        "scale": torch.tensor(0.5),
        "name": "a batch",
    }
    return {"input": given, "target": y}


def data(samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    return [(row, (row.sum() > 0).long()) for row in x]


def tensors(samples: int = SAMPLES) -> TensorData:
    x, y = (torch.stack(parts) for parts in zip(*data(samples), strict=True))
    return TensorData(x, y)


class Watch(Hook):
    """Notes what a batch and the model look like on the devices, and what is compiled."""

    def __init__(self) -> None:
        self.batches: set[str] = set()
        self.parameters: set[str] = set()
        self.states: set[str] = set()
        self.compiled: list[int] = []

    def on_forward(self, task: Task) -> None:
        if task.backend.lazy:
            assert task.batch is not None
            self.batches.add(spmd.sharding(task.batch.data[0]))

    def on_step(self, task: Task) -> None:
        if task.backend.lazy:
            self.compiled.append(spmd.compiles())
            self.parameters |= {spmd.sharding(p) for p in task.bare_model.parameters()}
            for opt in task.optimizers.values():
                self.states |= {spmd.sharding(s["momentum_buffer"]) for s in opt.state.values()}


def trained(
    way: str,
    *,
    train: Data | None = None,
    dropout: float = 0.0,
    norm: bool = True,
    epochs: int = 2,
    hooks: dict[str, Hook] | None = None,
) -> dict[str, Any]:
    """The numbers of a short training in double precision."""
    model = Network(dropout, norm)
    task = Task(
        model=model,
        phases=Phases(epochs=epochs),
        criterion=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train=train or Data(tensors(), 8),
        test={"test": Data(tensors(7), 4)},
        test_meters={"accuracy": Accuracy()},
        precision=Precision("float64"),
        backend=spmd.backend(way),
    )
    outcome = Trainer(task, hooks or {}).train()
    weights = {name: tensor.cpu().double().flatten().tolist() for name, tensor in
               task.bare_model.state_dict().items()}  # fmt: skip
    return {
        "updates": outcome.updates,
        "final": dict(outcome.final),
        "weights": weights,
        "described": task.backend.described(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the numbers that are not the same to 1e-10."""
    assert one["updates"] == other["updates"]
    pairs = {name: (w, other["weights"][name]) for name, w in one["weights"].items()}
    pairs |= {name: ([v], [other["final"][name]]) for name, v in one["final"].items()}
    return [name for name, (a, b) in pairs.items() if not spmd.close(a, b)]


def both(train: Callable[[], Data] | None = None, way: str = "spmd", **options: Any) -> list[str]:
    """Where SPMD differs from one process on the CPU; both in this process."""
    single, several = (
        trained(each, train=train() if train else None, **options) for each in ("single", way)
    )
    return differences(single, several)


def steady(way: str = "spmd") -> dict[str, Any]:
    """Four epochs of two whole batches and a small one."""
    watch = Watch()
    said = trained(way, epochs=4, hooks={"watch": watch})
    return {"described": said["described"], **vars(watch)}


def draws(way: str) -> dict[str, Any]:
    return trained(way, dropout=0.5)


def said_wrong() -> list[str]:
    """What cannot be, once this process has two devices."""
    problems = []
    for make in (
        lambda: trained("xla"),
        lambda: Trainer(_bare(Xla("cpu", spmd=True, devices=3)), {}).train(),
        lambda: Xla("cpu", spmd=True, devices=0),
        lambda: Xla("cpu", devices=2),
        lambda: Xla("cpu", shard=True),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        problems.append(str(caught.value))
    return problems


def _bare(backend: Xla) -> Task:
    model = nn.Linear(6, 3)
    return Task(
        model=model,
        phases=Phases(epochs=1),
        criterion=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(tensors(), 8),
        backend=backend,
    )


CASES: dict[str, Callable[[], Any]] = {
    "steady": steady,
    "ragged": both,
    "shard": functools.partial(steady, "shard"),
    "sharded": functools.partial(both, way="shard"),
    "nested": functools.partial(both, train=functools.partial(Data, data(), 8, collate=nested)),
    "micro-batches": functools.partial(
        both, train=functools.partial(Data, tensors(), 8, micro_batch_size=3), norm=False
    ),
    "draws": functools.partial(draws, "spmd"),
    "wrong": said_wrong,
}


def beside_torch_distributed() -> int:
    """How many devices there are, where torch.distributed has one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    backend = Xla("cpu", spmd=True, devices=2)
    backend.setup()
    assert backend.spmd is not None
    return backend.spmd.devices


def test_torch_distributed_may_know_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    ended = spmd.run(beside_torch_distributed)
    assert (ended.code, ended.value) == (0, 2), ended.output


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """All cases, in one process."""
    return spmd.results(CASES)


@pytest.mark.parametrize("case", ["ragged", "nested", "micro-batches", "sharded"])
def test_two_devices_compute_what_one_process_does(found: dict[str, Any], case: str) -> None:
    assert found[case] == []


def test_batches_are_cut_and_parameters_are_whole(found: dict[str, Any]) -> None:
    assert found["steady"]["batches"] == {"{devices=[2,1]0,1}"}
    assert found["steady"]["parameters"] == {"{replicated}"}


def test_parameters_are_cut_where_that_is_asked_for(found: dict[str, Any]) -> None:
    """And so is the optimizer's state. Along the longest: linear layers are 8 by 6, and 3 by 8."""
    cut = {"{devices=[2,1]0,1}", "{devices=[1,2]0,1}", "{devices=[2]0,1}"}
    assert found["shard"]["parameters"] == cut
    assert found["shard"]["states"] == cut
    assert found["steady"]["states"] == {"{replicated}"}


@pytest.mark.parametrize("case", ["steady", "shard"])
def test_a_program_is_compiled_once_for_each_shape_and_none_later(
    found: dict[str, Any], case: str
) -> None:
    """Steps of an epoch: 8, 8 and 5 samples in training, 4 and 3 in the test behind it."""
    compiled = found[case]["compiled"]
    assert len(compiled) == 4 * (3 + 2)
    assert len(set(compiled[2 * 5 :])) == 1


def test_draws_on_the_device_are_those_of_one_device(found: dict[str, Any]) -> None:
    one = spmd.results({"draws": functools.partial(draws, "xla")})["draws"]
    assert differences(one, found["draws"]) == []


def test_the_number_of_devices_is_said(found: dict[str, Any]) -> None:
    assert found["steady"]["described"] == "xla:0 (2 xla:CPU by SPMD)"


def test_what_cannot_be_is_said_by_key(found: dict[str, Any]) -> None:
    again, three, none, *without = found["wrong"]
    assert again == (
        "backend.spmd: this process runs XLA by SPMD, and cannot change: start another one"
    )
    assert three == (
        "backend.devices: 3 are asked for, and XLA has 2 of the type CPU in this process"
    )
    assert none == "backend.devices: 0 is less than 1"
    assert without == [
        f"backend.{key}: one process has several devices by SPMD: set backend.spmd=true"
        for key in ("devices", "shard")
    ]
