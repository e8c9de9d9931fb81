"""Initial weights: what is read, how names are changed, what is said, and what is refused."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Weights, load_weights


class Net(nn.Module):
    """A backbone with a batch norm, and a head."""

    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, classes)


NAMES = list(Net().state_dict())
BACKBONE = [name for name in NAMES if name.startswith("backbone.")]


def values(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Other values for everything in the model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(v.shape, generator=generator) if v.is_floating_point() else v + seed
        for name, v in model.state_dict().items()
    }


def saved(path: Path, content: Any) -> str:
    torch.save(content, path / "file.pt")
    return str(path / "file.pt")


def same(model: nn.Module, state: Mapping[str, Tensor], names: list[str] = NAMES) -> bool:
    now = model.state_dict()
    return all(torch.equal(now[name], state[name].to(now[name].dtype)) for name in names)


def refusal(model: nn.Module, weights: Weights | str) -> str:
    tensors = {n: v for n, v in model.state_dict().items() if isinstance(v, Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    with pytest.raises(ConfigError) as caught:
        load_weights(model, weights)
    assert same(model, before, list(before)), "a refused file has changed the model"
    return str(caught.value)


# --- files ---


@pytest.mark.parametrize("kind", ["pt", "old", "safetensors", "memory", "file", "memory_safe"])
def test_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    model = Net()
    state = values(model)
    path = str(tmp_path / "weights.bin")  # what it is called tells nothing
    if kind == "old":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif "safe" in kind:
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    if kind.startswith("memory"):
        fsspec.filesystem("memory").pipe("/weights/w.bin", Path(path).read_bytes())
        path = "memory://weights/w.bin"
    elif kind == "file":
        path = f"file://{path}"
    report = load_weights(model, path)
    assert list(report.loaded) == NAMES and report.total == len(NAMES)
    assert same(model, state)


@pytest.mark.parametrize("at", ["state_dict", "classy_state_dict.base_model.model.trunk", "a.b"])
def test_a_state_inside_a_file(tmp_path: Path, at: str) -> None:
    model = Net()
    state = values(model)
    content: Any = state
    for part in [at] if at == "a.b" else reversed(at.split(".")):  # a key may have a dot itself
        content = {part: content, "epoch": 3, "optimizer": {"state": {}}}
    path = saved(tmp_path, content)
    assert f"There are tensors at: {at}" in refusal(model, path)
    assert "weights.at: " in refusal(model, Weights(path, at="model"))
    load_weights(model, Weights(path, at=at))
    assert same(model, state)


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    absent = refusal(Net(), str(tmp_path / "absent.pt"))
    assert "weights.path: " in absent and "cannot be read: No such file" in absent
    assert "It holds no tensors by name, but: epoch" in refusal(
        Net(), saved(tmp_path, {"epoch": 1})
    )
    assert "but: list" in refusal(Net(), saved(tmp_path, [torch.zeros(1)]))
    assert "cannot be read" in refusal(Net(), "memory://nowhere/at.all")
    assert "is no protocol that fsspec knows" in refusal(Net(), "nosuch://place/file.pt")
    assert "chains protocols" in refusal(Net(), "reference::memory://b")
    assert "holds no whole checkpoint" in refusal(Net(), str(tmp_path))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("far", [False, True])
def test_what_is_damaged_is_called_so(tmp_path: Path, far: bool) -> None:
    """And not code, nor in torch's words, which say how to run what is in a file."""

    def said(content: bytes) -> str:
        path = str(tmp_path / "file.bin")
        Path(path).write_bytes(content)
        if far:
            path = f"memory://damaged/{tmp_path.name}.bin"
            fsspec.filesystem("memory").pipe(path, content)
        text = refusal(Net(), path)
        assert "\x1b" not in text and "weights_only" not in text
        return text.removeprefix(f"weights.path: {path} ")

    kinds: dict[str, Any] = {"zip": {}, "old": {"_use_new_zipfile_serialization": False}}
    files = {}
    for kind, options in kinds.items():
        torch.save(values(Net()), tmp_path / "whole", **options)
        files[kind] = (tmp_path / "whole").read_bytes()
    safetensors.torch.save_file(values(Net()), tmp_path / "whole")
    files["safe"] = (tmp_path / "whole").read_bytes()
    cut = "was not loaded: it is cut off, or no file of torch's or safetensors'"
    assert said(b"") == "is empty"
    shorter = [f[:n] for f in files.values() for n in (-9, len(f) // 2, 9)]
    others = [b"weights", b"config\nof the run\n", b"root:x:0:0:root", b"12345678{", bytes(99)]
    for content in [*shorter, *others, pickle.dumps({"w": 1}, 4)]:
        assert said(content) == cut, content[:9]
    for kind, options in kinds.items():
        torch.save({"w": torch.ones(1), "net": nn.Linear(1, 1)}, tmp_path / "whole", **options)
        assert said((tmp_path / "whole").read_bytes()) == (
            "was not loaded: a file of weights holds tensors and plain Python, and nothing in it "
            "is run; it asks for torch.nn.modules.linear.Linear"
        ), kind


# --- names ---


def test_prefixes_and_renaming(tmp_path: Path) -> None:
    model = Net()
    state = values(model)
    old = {f"module.{name.replace('head', 'fc')}": v for name, v in state.items()}
    path = saved(tmp_path, old)
    load_weights(model, Weights(path, remove_prefix="module.", rename={r"^fc\.": "head."}))
    assert same(model, state)
    trunk = {name.removeprefix("backbone."): state[name] for name in BACKBONE}
    again = Net()
    path = saved(tmp_path, trunk)
    report = load_weights(again, Weights(path, add_prefix="backbone.", include=["backbone"]))
    assert list(report.loaded) == BACKBONE == [n for n in NAMES if n not in report.left]
    assert same(again, state, BACKBONE)


def test_a_wrong_prefix_is_answered_with_the_right_one(tmp_path: Path) -> None:
    state = values(Net())
    for prefix in ("module.", "_orig_mod.", "model.net."):
        path = saved(tmp_path, {prefix + name: value for name, value in state.items()})
        text = refusal(Net(), path)
        assert f"0 of {len(NAMES)}" in text
        assert f"With remove_prefix: '{prefix}', {len(NAMES)} names would match" in text
    text = refusal(Net(), saved(tmp_path, {n[len("backbone.") :]: state[n] for n in BACKBONE}))
    assert f"With add_prefix: 'backbone.', {len(BACKBONE)} names would match" in text
    trunk = {f"trunk.{n[len('backbone.') :]}": state[n] for n in BACKBONE}
    text = refusal(Net(), saved(tmp_path, trunk))
    assert "With remove_prefix: 'trunk.' and add_prefix: 'backbone.'" in text
    text = refusal(Net(), Weights(saved(tmp_path, trunk), remove_prefix="modul."))
    assert "no name" in text and "They are like: trunk.0.weight" in text


def test_missing_unexpected_and_of_another_shape(tmp_path: Path) -> None:
    state = values(Net(classes=10))
    del state["backbone.1.running_mean"]
    state["extra.weight"] = torch.zeros(2)
    path = saved(tmp_path, state)
    model = Net()
    before = model.state_dict()["backbone.1.running_mean"].clone()
    text = refusal(model, path)
    for part in (
        "missing there (1): backbone.1.running_mean",
        "not in the model (1): extra.weight",
        "head.weight has [7, 3] here, [10, 3] there",
        "head.bias has [7] here, [10] there",
        f"{len(NAMES) - 3} of {len(NAMES)} tensors",
    ):
        assert part in text
    for allow in (["head"], ["head.*", "extra.*"], ["*.running_mean", "head.*"]):
        refusal(model, Weights(path, allow=allow))
    report = load_weights(model, Weights(path, allow=["head", "extra", "*.running_mean"]))
    assert list(report.missing) == ["backbone.1.running_mean"]
    assert list(report.unexpected) == ["extra.weight"]
    assert list(report.misfits) == ["head.weight", "head.bias"]
    assert len(report.loaded) == len(NAMES) - 3
    assert same(model, state, list(report.loaded))
    assert torch.equal(model.state_dict()["backbone.1.running_mean"], before)
    assert all(name in str(report) for name in [*NAMES, "extra.weight"])


def test_nothing_that_matches_is_no_success(tmp_path: Path) -> None:
    path = saved(tmp_path, {"other": torch.zeros(1)})
    assert f"0 of {len(NAMES)}" in refusal(Net(), Weights(path, allow=["*"]))
    text = refusal(Net(), Weights(saved(tmp_path, values(Net())), include=["heads.*"]))
    assert "include: the pattern 'heads.*' matches no name" in text and "'head" in text
    text = refusal(Net(), Weights(saved(tmp_path, values(Net())), allow=["classifier.*"]))
    assert "allow: the pattern 'classifier.*' matches no name" in text
    text = refusal(Net(), Weights(saved(tmp_path, values(Net())), rename={"^fc": "head"}))
    assert "rename: '^fc' is in no name" in text
    both = {**values(Net()), "module.head.bias": torch.zeros(7)}
    text = refusal(Net(), Weights(saved(tmp_path, both), remove_prefix="module."))
    assert "two names" in text and "'head.bias'" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": ""}, "path: '' is no path"),
        ({"include": []}, "include: nothing would be loaded"),
        ({"include": "head"}, "include: 'head' is not a list of patterns"),
        ({"allow": [1]}, "allow: [1] is not a list of patterns"),
        ({"rename": {"(": ""}}, "rename: '(' is no regular expression"),
        ({"add_prefix": 3}, "add_prefix: 3 is not a string"),
        ({"which": "best"}, "which: is for a checkpoint or a run"),
        ({"averages": "ema"}, "averages: is for a checkpoint or a run"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = saved(tmp_path, values(Net()))
    assert said in refusal(Net(), Weights(**{"path": path, **options}))


# --- values ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_conversions_are_said(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Net()
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in values(model).items()}
    report = load_weights(model, saved(tmp_path, state))
    kinds = f"{str(dtype).removeprefix('torch.')} -> float32"
    floats = sum(v.is_floating_point() for v in state.values())
    assert report.converted == {kinds: floats} and f"converted ({floats}): {kinds}" in str(report)
    assert same(model, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_nan_in_what_is_loaded_is_said(tmp_path: Path, caplog: Any, dtype: torch.dtype) -> None:
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in values(Net()).items()}
    state["backbone.1.running_mean"][0] = torch.inf  # a mask may have it
    load_weights(Net(), saved(tmp_path, state))
    assert caplog.text == ""
    for name in ("head.weight", "head.bias", "backbone.0.weight", "backbone.0.bias"):
        state[name].view(-1)[-1] = torch.nan
    path = saved(tmp_path, state)
    load_weights(Net(), Weights(path, include=["backbone"]))
    (record,) = caplog.records
    said = f"weights: {path} has NaN in tensors that are loaded: backbone.0.weight, backbone.0.bias"
    assert record.getMessage() == said
    caplog.clear()
    load_weights(Net(), path)
    (record,) = caplog.records
    assert record.getMessage() == f"{said}, head.weight and 1 more"


def test_another_kind_of_number_does_not_fit(tmp_path: Path) -> None:
    state: dict[str, Any] = values(Net())
    state["head.bias"] = torch.zeros(7, dtype=torch.int32)
    state["backbone.0.bias"] = [1.0, 2.0, 3.0]
    text = refusal(Net(), saved(tmp_path, state))
    assert "head.bias has float32 here, int32 there" in text
    assert "backbone.0.bias has a tensor here, a list there" in text


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


@pytest.mark.parametrize("kind", ["sparse_coo", "no values"])
def test_what_could_not_be_copied_changes_nothing(tmp_path: Path, kind: str) -> None:
    """torch would have loaded all the other names before it says so."""
    model = nn.Linear(4, 2)
    sparse = torch.ones(2, 4).to_sparse()
    weight = sparse if kind == "sparse_coo" else torch.ones(2, 4, device="meta")
    path = saved(tmp_path, {"weight": weight, "bias": torch.ones(2)})
    assert f"weight has strided here, {kind} there" in refusal(model, path)


def test_tied_weights(tmp_path: Path) -> None:
    weight = torch.rand(5, 3)
    for state in ({"embed.weight": weight}, {"out.weight": weight},
                  {"embed.weight": weight, "out.weight": weight.clone()}):  # fmt: skip
        model = Tied()
        report = load_weights(model, saved(tmp_path, state))
        assert len(report.loaded) == report.total == 2
        assert model.out.weight is model.embed.weight and torch.equal(model.out.weight, weight)
    other = {"embed.weight": weight, "out.weight": weight + 1}
    text = refusal(Tied(), saved(tmp_path, other))
    assert "out.weight has one tensor with embed.weight here, another there" in text
    for allowed, expected in (("out", weight), ("embed", weight + 1)):
        model = Tied()
        load_weights(model, Weights(saved(tmp_path, other), allow=[allowed]))
        assert torch.equal(model.embed.weight, expected)


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state(tmp_path: Path) -> None:
    model, other = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    other[0].calls = 5
    path = saved(tmp_path, other.state_dict())
    assert len(load_weights(model, path).loaded) == 3
    assert model[0].calls == 5
    state = {n: v for n, v in other.state_dict().items() if isinstance(v, Tensor)}
    path = saved(tmp_path, state)
    assert "missing there (1): 0._extra_state" in refusal(model, path)
    load_weights(model, Weights(path, allow=["*._extra_state"]))
    assert model[0].calls == 5


def test_layout_frozen_parameters_and_storage_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    state = OrderedDict(values(model))
    model.to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    before = [p.data_ptr() for p in model.parameters()]
    load_weights(model, saved(tmp_path, state))
    assert [p.data_ptr() for p in model.parameters()] == before
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert same(model, state, list(state))
