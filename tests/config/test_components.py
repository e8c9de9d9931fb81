"""Components: names, targets, the allow-list, and options checked before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phaseloop.engine import registry
from phaseloop.engine.config import build as _  # noqa: F401 registers torch's optimizers
from phaseloop.engine.config.components import Components, import_module
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.registry import Registry

THINGS = Registry("thing")


@THINGS.register("box")
class Box:
    def __init__(self, size: int, lid: bool = False, inside: object = None) -> None:
        self.size, self.lid, self.inside = size, lid, inside


def refusal(spec, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        Components(**more).make(spec, THINGS, "the.key")
    return str(caught.value)


def test_a_component_by_name_and_by_target():
    box = Components().make({"name": "box", "size": 3, "lid": True}, THINGS, "k")
    assert (box.size, box.lid) == (3, True)
    made = Components().make({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3},
                             THINGS, "k")  # fmt: skip
    assert isinstance(made, torch.nn.Linear) and made.out_features == 3


def test_components_inside_options_are_made_too():
    spec = {"name": "box", "size": 1, "inside": [{"_target_": "torch.nn.ReLU"}, {"a": 1}]}
    box = Components().make(spec, THINGS, "k")
    assert isinstance(box.inside[0], torch.nn.ReLU) and box.inside[1] == {"a": 1}


def test_mistakes_name_key_and_allowed():
    assert "the.key.sise: Box takes no option 'sise'. Did you mean 'size'?" in refusal(
        {"name": "box", "sise": 1}
    )
    assert "the.key.size: Box needs a value" in refusal({"name": "box"})
    assert "the.key.size: 'x' is not int" in refusal({"name": "box", "size": "x"})
    assert "no thing is called 'bix'. Did you mean 'box'?" in refusal({"name": "bix"})
    assert "the.key.name: give the name of a thing: box" in refusal({"size": 1})
    assert "not a mapping" in refusal("box")


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.load",
        "torch.hub.load",
        "builtins.open",
        "subprocess.run",
        # the same function by the name that another module has for it
        "torch.nn.functional.torch.load",
        "torch.utils.data.dataloader.os.system",
    ],
)
def test_code_outside_the_allowed_packages_is_refused(target):
    text = refusal({"_target_": target})
    assert "allow_targets" in text and target in text


def test_allow_targets_and_imports_extend_the_list(tmp_path, monkeypatch):
    text = refusal({"_target_": "collections.OrderedDict"})
    assert "allow_targets" in text
    assert (
        Components(allow_targets=["collections"]).make(
            {"_target_": "collections.OrderedDict"}, THINGS, "k"
        )
        == {}
    )
    (tmp_path / "users_own_parts.py").write_text("class Part:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    parts = Components(imports=["./users_own_parts.py"])
    made = parts.make({"_target_": "users_own_parts.Part"}, THINGS, "k")
    assert type(made).__name__ == "Part"


def test_a_misspelled_target_gets_the_nearest_name():
    assert "Did you mean 'Linear'?" in refusal({"_target_": "torch.nn.Linaer"})
    assert "there is no module 'nowhere'" in refusal(
        {"_target_": "nowhere.Thing"}, allow_targets=["nowhere"]
    )


def test_imports_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="imports: there is no file"):
        import_module("./absent.py")
    with pytest.raises(ConfigError, match=r"no module is called .absent_package"):
        import_module("absent_package.steps")
    Path("faulty_import.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    # A fault inside the user's module is the user's to see, as it is.
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        import_module("faulty_import")


def test_torchs_optimizers_are_checked_by_their_own_signatures():
    components = Components()
    components.check({"name": "sgd", "lr": 1, "momentum": 0.9}, registry.optimizers, "optimizer", 1)
    with pytest.raises(ConfigError, match=r"optimizer\.betas: SGD takes no option"):
        components.check({"name": "sgd", "betas": [1, 2]}, registry.optimizers, "optimizer", 1)
