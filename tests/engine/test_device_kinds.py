"""Kinds of device: what is asked of torch for a TPU, by a stand-in; and what a GPU is still asked.

torch makes its PrivateUse1 a device named ``tpu`` here, as torch-tpu does, with two of them. No
tensor is made on them.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import ConfigError
from phaseloop.engine import environment
from phaseloop.engine.backends import Ddp, Single
from phaseloop.engine.backends.devices import choose
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.transfer import by_function
from phaseloop.engine.device_kinds import KINDS, kind_of
from tests.rigs import process


class Generator:
    """Counts its draws; that is its state."""

    def __init__(self) -> None:
        self.drawn = 0

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.drawn])

    def set_state(self, state: torch.Tensor) -> None:
        self.drawn = int(state)


def stand_in() -> Any:
    """A module ``torch.tpu`` of two devices, of which this process is bound to the second."""
    from torch.utils import backend_registration

    class Hooks(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return True

    class Module(types.ModuleType):
        def __init__(self) -> None:
            super().__init__("tpu")
            self.seeds: list[int] = []
            self.default_generators = (Generator(), Generator())

        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 2

        def get_device_name(self, device: Any = None) -> str:
            return "TPU v7"

        def manual_seed(self, seed: int) -> None:
            self.seeds.append(seed)

        manual_seed_all = manual_seed

    module = Module()
    backend_registration._setup_privateuseone_for_python_backend("tpu", module, Hooks())
    torch.accelerator.current_device_index = lambda: 1
    return module


def _problem(device: str, number: int | None = None) -> str:
    try:
        choose(device, number)
    except ConfigError as error:
        assert error.key == "backend.device"
        return str(error).removeprefix("backend.device: ")
    raise AssertionError(f"{device} is allowed")


def _break_off(data: Any, device: torch.device) -> Any:
    torch.get_device_module("tpu").default_generators[device.index].drawn += 5
    raise ValueError("broken off")


def _group(backend: Ddp) -> Any:
    """The kind of process group that it asks torch for."""
    asked: list[Any] = []
    torch.distributed.init_process_group = lambda kind, **_: asked.append(kind)
    backend._join(torch.distributed.HashStore())
    return asked[0]


def with_a_tpu() -> dict[str, Any]:
    module = stand_in()
    backend = Single("tpu:1")
    said: dict[str, Any] = {
        "chosen": [str(choose(d)) for d in ("auto", "cpu", "tpu", "tpu:0", "tpu:1")],
        "of several": str(choose("tpu", 0)),  # not by its number: a process is bound to one
        "problems": [_problem("tpu:2"), _problem("tpu:0", 1), _problem("cuda"), _problem("xpu")],
        "described": backend.described(),
        "group": _group(Ddp("tpu")),
        "facts": backend.device_name,
    }
    used: list[Any] = []
    torch.accelerator.set_device_index = used.append  # type: ignore[assignment]
    backend.setup()
    said["used"] = [str(device) for device in used]
    backend.seed_device(7)
    said["seeds"] = list(module.seeds)
    mine = module.default_generators[1]
    mine.drawn = 3
    state = backend.rng_state()
    said["state"] = {name: one.tolist() for name, one in state.items()}
    mine.drawn = 9
    backend.set_rng_state(state)
    said["put back"] = [one.drawn for one in module.default_generators]
    with pytest.raises(ValueError):
        by_function(_break_off, 1, backend.device, backend)
    said["after a broken-off move"] = mine.drawn
    said["without statistics"] = (backend.memory(), backend.free_memory())
    calls: list[Any] = []
    torch.accelerator.empty_cache = lambda: calls.append("emptied")
    torch.accelerator.max_memory_allocated = lambda device: calls.append(str(device)) or 64  # type: ignore[misc,assignment,func-returns-value]
    backend.free_memory()
    torch.accelerator.synchronize = lambda device: calls.append(f"waited for {device}")  # type: ignore[assignment,misc]
    backend.kind.wait(backend.device)
    said["memory"] = (backend.memory(), calls)
    said["pins"] = Data([1], 1, workers=1).pins(backend.device)
    return said


def test_a_tpu_is_asked_by_what_torch_has_for_it() -> None:
    said = process.result(with_a_tpu)
    assert said["chosen"] == ["cpu", "cpu", "tpu:1", "tpu:0", "tpu:1"]
    assert said["of several"] == "tpu:1"
    assert said["problems"][0] == "'tpu:2': there are 2 TPUs here"
    assert said["problems"][1] == (
        "'tpu:0': of several processes each takes the TPU of its own number; use tpu"
    )
    assert said["problems"][2] == "'cuda': there are 0 GPUs here"
    assert said["problems"][3] == "'xpu' is not auto, cpu, cuda, cuda:N, tpu or tpu:N"
    assert said["described"] == "tpu:1 (TPU v7)"
    assert said["group"] == "cpu:gloo,tpu:tpu_dist"
    assert said["facts"] == "TPU v7"
    assert said["used"] == ["tpu:1"]
    assert said["seeds"] == [7]
    assert said["state"] == {"tpu": [3]}
    assert said["put back"] == [0, 3]
    assert said["after a broken-off move"] == 3
    assert said["without statistics"] == (0, None)
    assert said["memory"] == (64, ["emptied", "waited for tpu:1", "tpu:1"])
    assert said["pins"] is False


@pytest.mark.parametrize("device", ["tpu", "tpu:3"])
def test_without_torch_tpu_it_is_said_what_to_install(device: str) -> None:
    assert _problem(device) == (
        f"{device!r}: torch knows no TPU here; that takes torch-tpu (pip install torch-tpu), "
        f"and a TPU"
    )
    with pytest.raises(ConfigError, match="torch-tpu"):
        Ddp(device)


def test_a_gpu_is_asked_what_it_always_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def stands_for(name: str, value: Any) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *args: calls.append((name, *args)) or value)  # type: ignore[func-returns-value]

    for name, value in {
        "is_available": True, "device_count": 2, "set_device": None, "manual_seed": None,
        "get_rng_state": torch.tensor([4]), "set_rng_state": None, "max_memory_allocated": 32,
        "empty_cache": None, "get_device_name": "H200", "synchronize": None,
    }.items():  # fmt: skip
        stands_for(name, value)
    assert [str(choose(d)) for d in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    assert str(choose("auto", 1)) == "cuda:1"
    assert (
        _problem("cuda", 2)
        == "'cuda': there are 2 GPUs here, and this is process 2 of this machine"
    )
    backend = Single("cuda:1")
    calls.clear()
    device = torch.device("cuda", 1)
    backend.setup()
    backend.seed_device(5)
    state = backend.rng_state()
    backend.set_rng_state(state)
    backend.set_rng_state({})  # of a checkpoint made on the CPU
    kind_of(device).wait(device)
    assert backend.memory() == 32
    backend.free_memory()
    assert backend.described() == "cuda:1 (H200)"
    assert calls == [
        ("set_device", device), ("manual_seed", 5), ("get_rng_state", device),
        ("set_rng_state", state["cuda"], device), ("synchronize", device),
        ("max_memory_allocated", device), ("empty_cache",), ("get_device_name", device),
    ]  # fmt: skip
    assert KINDS["cuda"].group == "cpu:gloo,cuda:nccl"
    assert KINDS["cuda"].pins


def test_the_cpu_and_devices_of_backends_of_their_own_ask_for_nothing() -> None:
    backend = Single("cpu")
    backend.setup()
    backend.seed_device(1)
    backend.free_memory()
    assert (backend.rng_state(), backend.memory(), backend.described()) == ({}, 0, "cpu")
    other = torch.device("xla", 0)
    kind = kind_of(other)
    assert (kind.pins, kind.caches, kind.group, kind.model(other)) == (False, False, "gloo", "xla")


def test_torch_is_asked_of_kinds_of_device_in_few_places() -> None:
    """Whoever asks for the type of a device has to know of all of them."""
    root = Path(environment.__file__).parents[1]
    asks = {
        str(file.relative_to(root))
        for folder in ("engine", "hooks", "train_steps", "tools")
        for file in (root / folder).rglob("*.py")
        if any(word in file.read_text() for word in ("torch.cuda.", '"cuda"'))
    }
    assert asks == {
        "engine/device_kinds.py",
        "engine/backends/devices.py",  # auto
        "engine/backends/processes.py",
        "engine/backends/ddp.py",  # synchronised batch norm, which torch has there
    }
