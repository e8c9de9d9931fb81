"""Step extract: every sample's features on disk, whole or not at all, by any processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    ConfigError,
    Data,
    DataError,
    Debug,
    Features,
    Hook,
    Phases,
    Run,
    Stage,
    Task,
    TensorData,
    Trainer,
    Weights,
    load_features,
)
from phaseloop.train_steps import Extract
from tests.rigs import process, ranks

SAMPLES = 7  # in batches of 3: 3, 3 and 1
WIDTH = 4


class Net(nn.Module):
    """[B, 4] to [B, 2]; the ReLU works in the memory of what comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, output: str = "last") -> Tensor:
        hidden = self.relu(self.first(x))
        return hidden if output == "hidden" else self.last(hidden)


def samples(count: int = SAMPLES) -> TensorData:
    generator = torch.Generator().manual_seed(1)
    return TensorData(torch.randn(count, WIDTH, generator=generator), torch.arange(count) % 2)


def task_of(folder: Path, step: Any, data: Any = None, **options: Any) -> Task:
    """Tests only, of a model that is the same each time."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "phases": Phases(epochs=0),
        "test": Data(samples(), 3) if data is None else data,
        "run": Run(dir=str(folder), threads=1),
    }
    return Task(model=Net(), train_step=step, **{**settings, **options})


def extracted(folder: Path, step: Any, **options: Any) -> Features:
    Trainer(task_of(folder, step, **options), hooks={}).train()
    return load_features(folder / "features" / "test")


def expected(output: str = "last") -> Tensor:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        # In the same pieces: a product of other shapes may differ in the last bit.
        return torch.cat([model(x, output) for x in samples().tensors[0].split(3)])


@pytest.mark.parametrize("samples_per_file", [1, 4, 100])
def test_every_sample_once_in_the_order_of_the_dataset(tmp_path, samples_per_file):
    found = extracted(tmp_path, Extract(samples_per_file=samples_per_file))
    assert torch.equal(found.features, expected())
    assert found.targets is not None and torch.equal(found.targets, torch.arange(SAMPLES) % 2)
    assert found.indices.tolist() == list(range(SAMPLES)) and len(found) == SAMPLES
    assert found.about["set"] == "test" and found.about["samples"] == SAMPLES
    # A batch of 3 is not cut: with 1 each makes a part; with 4 the second fills one.
    parts = {1: [3, 3, 1], 4: [6, 1], 100: [7]}[samples_per_file]
    assert [part["samples"] for part in found.about["parts"]] == parts


def test_what_the_model_gives_by_name(tmp_path):
    assert torch.equal(extracted(tmp_path, Extract(output="hidden")).features, expected("hidden"))


def test_a_layer_as_it_was_before_an_operation_in_place(tmp_path):
    found = extracted(tmp_path, Extract(layer="first")).features
    assert (found < 0).any()  # the ReLU has not reached them
    assert torch.equal(found.relu(), expected("hidden"))


def test_meters_get_what_the_model_gave(tmp_path):
    from phaseloop import Accuracy

    task = task_of(tmp_path, Extract(layer="first"), test_meters={"accuracy": Accuracy()})
    final = Trainer(task).train().final
    hits = (expected().argmax(dim=1) == torch.arange(SAMPLES) % 2).double().mean()
    assert final["test/accuracy"] == pytest.approx(float(hits))


def test_a_set_without_targets(tmp_path):
    found = extracted(tmp_path, Extract(), data=Data(TensorData(*samples().tensors[:1]), 3))
    assert found.targets is None and torch.equal(found.features, expected())


def test_every_test_set_has_a_folder(tmp_path):
    sets = {"small": Data(samples(2), 3), "all": Data(samples(), 3)}
    Trainer(task_of(tmp_path, Extract(folder=str(tmp_path / "out")), test=sets), hooks={}).train()
    assert len(load_features(tmp_path / "out/small")) == 2
    assert torch.equal(load_features(tmp_path / "out/all").features, expected())


@pytest.mark.parametrize("backend", ["Ddp", "Fsdp"])
def test_two_processes_extract_what_one_does(tmp_path, backend):
    """Of the last batch, of one sample, the second process has none: with FSDP a stand-in."""
    one = extracted(tmp_path / "one", Extract(samples_per_file=2))
    ended = ranks.run(in_folder, str(tmp_path / "two"), backend)
    assert [process.code for process in ended] == [0, 0], [process.output for process in ended]
    two = load_features(tmp_path / "two/features/test")
    assert {part["file"][:10] for part in two.about["parts"]} == {"part-00000", "part-00001"}
    torch.testing.assert_close(two.features, one.features, rtol=1e-6, atol=1e-6)
    assert torch.equal(two.indices, one.indices)
    assert one.targets is not None and two.targets is not None
    assert torch.equal(two.targets, one.targets)


def in_folder(folder: str, backend: str) -> None:
    """What each of several processes does."""
    import phaseloop
    from phaseloop import default_hooks

    hooks = {
        name: hook for name, hook in default_hooks().items() if name in ("meter_sync", "barrier")
    }
    backend = getattr(phaseloop, backend)()
    Trainer(
        task_of(Path(folder), Extract(samples_per_file=2), backend=backend), hooks=hooks
    ).train()


class Breaks(Hook):
    """An error at the second batch."""

    def on_step(self, task: Task) -> None:
        if task.phase.position == 2:
            raise RuntimeError("broken")


def test_what_was_cut_short_is_no_set_and_is_done_again_as_a_whole(tmp_path):
    before = extracted(tmp_path, Extract(output="hidden", samples_per_file=1))
    with pytest.raises(RuntimeError, match="broken"):
        Trainer(task_of(tmp_path, Extract(samples_per_file=1)), hooks={"breaks": Breaks()}).train()
    # The old one stands until the new one is whole.
    again = load_features(tmp_path / "features/test")
    assert torch.equal(again.features, before.features)
    assert torch.equal(extracted(tmp_path, Extract()).features, expected())
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["test"]


class Killed(Hook):
    """As no handler can notice, at the second batch."""

    def on_step(self, task: Task) -> None:
        if task.phase.position == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: str) -> None:
    step = Extract(samples_per_file=1)
    Trainer(task_of(Path(folder), step), hooks={"killed": Killed()}).train()


def test_killed_in_the_middle_it_is_done_again_as_a_whole(tmp_path):
    assert process.run(killed, str(tmp_path)).code == -signal.SIGKILL
    (unfinished,) = (tmp_path / "features").iterdir()
    assert unfinished.name == "test.unfinished" and len([*unfinished.iterdir()]) == 2
    assert torch.equal(extracted(tmp_path, Extract()).features, expected())
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["test"]


def test_what_it_began_with_is_said_with_its_checksum(tmp_path):
    path = tmp_path / "given.pt"
    torch.save(Net().state_dict(), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    weights = Weights(str(path), include=["first"])
    found = extracted(tmp_path, Extract(output="hidden"), weights=weights).about
    assert found["weights"] == str(path)
    told = {"path": str(path), "sha256": sha256, "include": ["first"]}
    assert found["initial_weights"] == told
    assert "initial_weights" not in extracted(tmp_path / "none", Extract()).about


def test_a_stage_without_updates_extracts_between_two_that_train(tmp_path):
    torch.manual_seed(0)
    model = Net()
    stages = [
        Stage(name="a", epochs=1),
        Stage(name="look", updates=0, test_at_start=True, train_step=Extract()),
        Stage(name="b", epochs=1),
    ]
    weights: dict[int, Tensor] = {}

    class Keep(Hook):
        def on_phase_end(self, task: Task) -> None:
            if task.train:
                with torch.no_grad():
                    weights[task.progress.stage] = model(samples().tensors[0])

    task = Task(
        model=model, criterion=nn.CrossEntropyLoss(), phases=stages,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        train=Data(samples(), 3), test=Data(samples(), SAMPLES),
        run=Run(dir=str(tmp_path), threads=1),
    )  # fmt: skip
    Trainer(task, hooks={"keep": Keep()}).train()
    found = load_features(tmp_path / "features/test")
    assert found.about["updates"] == 3  # an epoch
    torch.testing.assert_close(found.features, weights[0])
    assert not torch.allclose(found.features, weights[2])


def test_a_quick_try_writes_nothing(tmp_path):
    Trainer(task_of(tmp_path, Extract(), debug=Debug(fast=1)), hooks={}).train()
    assert not (tmp_path / "features").exists()


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "key", "problem"),
    [
        (lambda f: Extract(output="a", layer="b"), "train_step.layer", "not both"),
        (lambda f: Extract(samples_per_file=0), "train_step.samples_per_file", "0 is less than 1"),
        (lambda f: run(f, Extract(layer="frist")), "train_step.layer", "Did you mean 'first'"),
        (
            lambda f: run(f, Extract(output="x"), model=nn.Linear(WIDTH, 2)),
            "train_step.output",
            "Linear.forward takes no argument 'output'",
        ),
        (lambda f: run(f, Extract(), test=None, train=Data(samples(), 3)), "data.test", "is none"),
        (
            lambda f: run(f, Extract(), train=Data(samples(), 3), phases=Phases(epochs=1)),
            "phases.updates",
            "trains nothing",
        ),
        (lambda f: run(f, Extract(), run=Run()), "train_step.folder", "the run has no folder"),
        (lambda f: run(f, Extract(folder=f)), "train_step.folder", "holds no features.json"),
        (lambda f: run(f, Extract(layer="relu"), model=Twice()), "train_step.layer", "2 times"),
        (lambda f: run(f, Extract(), model=Pairs()), "train_step.output", "are a tuple"),
        (lambda f: run(f, Extract(), model=Sum()), "train_step.output", r"are \[1\] for a batch"),
    ],
)
def test_what_is_refused(tmp_path, make, key, problem):
    (tmp_path / "test").mkdir()  # somebody's, and no features
    with pytest.raises(ConfigError, match=problem) as error:
        make(str(tmp_path))
    assert str(error.value).startswith(key)


def run(folder: str, step: Any, model: nn.Module | None = None, **options: Any) -> None:
    settings: dict[str, Any] = {
        "phases": Phases(epochs=0),
        "test": Data(samples(), 3),
        "run": Run(dir=folder, threads=1),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    task = Task(model=model or Net(), train_step=step, **{**settings, **options})
    Trainer(task, hooks={}).train()


class Twice(Net):
    def forward(self, x: Tensor, output: str = "last") -> Tensor:
        return self.relu(self.relu(x))


class Pairs(Net):
    def forward(self, x: Tensor, output: str = "last") -> Any:
        return x, x


class Sum(Net):
    def forward(self, x: Tensor, output: str = "last") -> Tensor:
        return x.sum(dim=0, keepdim=True)[:, 0]


# --- reading ---


def test_damage_is_found(tmp_path):
    extracted(tmp_path, Extract(samples_per_file=3))
    folder = tmp_path / "features/test"
    part = folder / "part-00000-00001.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"00001\.safetensors has changed"):
        load_features(folder)
    part.unlink()
    with pytest.raises(DataError, match=r"00001\.safetensors cannot be read"):
        load_features(folder)


def test_a_folder_that_is_none_names_the_sets_in_it(tmp_path):
    extracted(tmp_path, Extract())
    with pytest.raises(DataError, match=r"holds no features\.json.*there are sets in it: test"):
        load_features(tmp_path / "features")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"format": 2}, "not of format 1"), ({"parts": [{"file": "../x"}]}, "not in its folder")],
)
def test_a_manifest_is_not_believed_blindly(tmp_path, change, message):
    extracted(tmp_path, Extract())
    path = tmp_path / "features/test/features.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        load_features(path.parent)
