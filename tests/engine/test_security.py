"""Nothing is unpickled unsafely, and a configuration runs no code but what it says it runs."""

from __future__ import annotations

import ast
import base64
import importlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import phaseloop.hooks
import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop.engine import registry
from phaseloop.engine.config import build as _  # noqa: F401 registers torch's optimizers
from phaseloop.engine.config.components import Components
from phaseloop.engine.config.targets import ALLOWED, Targets
from phaseloop.engine.errors import ConfigError
from phaseloop.tools.run import WRONG_CONFIG
from phaseloop.tools.run import run as run_here
from tests.rigs import cli

# --- the source: what may run what it reads ---

FOLDERS = ("engine", "hooks", "tools", "recipes", "train_steps", "benchmarks")

UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal",
    "jsonpickle", "code", "codeop", "runpy", "hydra.utils", "torch.hub", "torch.package",
}  # fmt: skip
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {
    "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
    "torch.hub.load", "torch.jit.load", "torch.ops.load_library", "torch.classes.load_library",
    "torch.utils.cpp_extension.load", "torch.export.load", "pandas.read_pickle", "pd.read_pickle",
    "importlib.import_module", "importlib.__import__", "hydra.utils.instantiate",
    "hydra.utils.call", "OmegaConf.register_new_resolver",
    "torch.serialization.add_safe_globals",
}  # fmt: skip
NEEDS = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}

# Where one of these is meant, and what keeps it safe.
KNOWN = {
    # names of our own modules only
    ("phaseloop/__init__.py", "importlib.import_module"),
    ("engine/__init__.py", "importlib.import_module"),
    # `imports` is code, and says so
    ("engine/config/components.py", "importlib.import_module"),
    # inside the packages that a target may name
    ("engine/config/targets.py", "importlib.import_module"),
    # what processes of one job say to one another, as by torch's own functions for objects
    ("engine/backends/host.py", "pickle"),
    ("engine/backends/xla/threads.py", "pickle"),
    # torch_xla, late
    ("engine/backends/xla/package.py", "importlib.import_module"),
    # readelf and gcc, for the libraries of torch in an environment that is being built
    ("tools/environments/stub_cuda.py", "subprocess.run"),
    # our own command line, once for each seed
    ("tools/seeds.py", "subprocess.run"),
    # a part of torch by its name
    ("tools/run.py", "importlib.import_module"),
    # itself, in fresh interpreters
    ("benchmarks/startup.py", "subprocess.run"),
}


def sources() -> list[Path]:
    """Every file once; in phaseloop/ the folders are links."""
    found = [path for folder in FOLDERS for path in (cli.ROOT / folder).rglob("*.py")]
    return [*found, *(cli.ROOT / "phaseloop").glob("*.py")]


def unsafe(source: str) -> Iterator[str]:
    """What in a piece of Python may run what it reads."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if node.module in UNSAFE_MODULES:
                yield str(node.module)
            yield from (names & (UNSAFE_MODULES | UNSAFE_CALLS | set(NEEDS)))
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in UNSAFE_NAMES or called in UNSAFE_CALLS:
                yield called
            elif called in NEEDS:
                name, value = NEEDS[called]
                said = [k.value for k in node.keywords if k.arg == name]
                if not any(isinstance(v, ast.Constant) and v.value is value for v in said):
                    yield f"{called} without {name}={value}"
            elif called.endswith((".load_module", ".__import__", "subprocess.run")):
                yield called
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            yield "shell="


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_nothing_in_the_house_runs_what_it_reads() -> None:
    found = {
        (str(path.relative_to(cli.ROOT)), what)
        for path in sources()
        for what in unsafe(path.read_text())
    }
    assert found - KNOWN == set()
    assert KNOWN - found == set(), "these are no longer there: strike them out"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('a')",
        "import torch\ntorch.load('a', weights_only=False)",
        "import torch\ntorch.load('a', weights_only=flag)",
        "from torch import load",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "import numpy as np\nnp.load('a')",
        "yaml.load(text, Loader=yaml.Loader)",
        "x = eval('1')",
        "exec('1')",
        "__import__('os')",
        "import os\nos.system('ls')",
        "subprocess.run('ls', shell=True)",
        "from hydra.utils import instantiate",
        "import torch\ntorch.hub.load('a', 'b')",
        "import joblib",
        "torch.serialization.add_safe_globals([X])",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(unsafe(line))


def test_the_search_lets_pass_what_is_safe() -> None:
    for line in ("torch.load(p, map_location='cpu', weights_only=True)", "yaml.safe_load(t)",
                 "np.load(p, allow_pickle=False)", "model.compile()", "re.compile('a')",
                 "model.eval()"):  # fmt: skip
        assert list(unsafe(line)) == []


# --- targets: attacks on the real check ---

ATTACKS = [
    "os.system",
    "builtins.eval",
    "builtins.open",
    "subprocess.run",
    "importlib.import_module",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.jit.load",
    "torch.serialization.load",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load",
    "torch.utils.cpp_extension.load_inline",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch._C._jit_set_profiling_mode",
    "torch.multiprocessing.spawn",
    "torch.distributed.run.main",
    "torch.distributed.launch.main",
    "torch.os.system",
    # the same functions by the names that allowed modules have for them
    "torch.nn.functional.torch.load",
    "torch.nn.functional.torch.hub.load",
    "torch.nn.functional.importlib.import_module",
    "torch.nn.modules.module.torch.serialization.load",
    "torch.utils.data.dataloader.os.system",
    "torch.utils.data.dataloader.multiprocessing.spawn",
    "torch.optim.optimizer.torch.save",
    "torch.optim.lr_scheduler.types.FunctionType",
    "torchmetrics.metric.inspect.getsource",
    # walks through what every object has
    "torch.nn.Linear.__init__.__globals__",
    "torch.nn.Linear.forward.__globals__.get",
    "torch.nn.Linear.__class__",
    "torch.nn.Linear.__subclasses__",
    "torch.nn.Linear.__init__.__builtins__",
    "torch.nn.Module.__reduce_ex__",
    "torch.nn.Module.load_state_dict",
    # what lies in an allowed package and does more than make a part of a training
    "torch.utils.data.datapipes.utils.decoder.basichandlers",
    "torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper",
    "torch.utils.data.datapipes.iter.FileOpener",
    "torch.utils.data.datapipes.gen_pyi.main",
    "torchmetrics.functional.image.lpips._LPIPS",
    "torchmetrics.functional.text.bert._read_csv_from_url",
    "torchmetrics.multimodal.CLIPScore",
    "torchmetrics.functional.multimodal.clip_score",
    "phaseloop.engine.config.components.import_module",
    "phaseloop.engine.config.targets._import_object",
    "phaseloop.engine.checkpoint.store._remove",
    "phaseloop.engine.checkpoint.store.Store",
    "phaseloop.engine.run_folder.replace_text",
    "phaseloop.engine.run_folder.put_aside",
    "phaseloop.engine.disk.replace",
    "phaseloop.tools.run.main",
    "phaseloop.tools.export.export",
    "phaseloop.recipes.digits.make_data.main",
    "phaseloop.hooks.curves._save",
    "phaseloop.engine.config.targets.importlib.import_module",
    "phaseloop.hooks.checkpoint.time.sleep",
    "phaseloop.load_weights",
]


@pytest.mark.parametrize("target", ATTACKS)
def test_what_no_target_may_be(target: str, tmp_path: Path) -> None:
    for imports in ([], ["phaseloop.recipes.digits"], ["torch"], ["os"]):  # none opens a package
        for spec in (
            {"_target_": target},
            {"_target_": "torch.nn.Sequential", "args": {"_target_": target}},
            {"name": "cross_entropy", "weight": {"_target_": target}},
            {"name": "cross_entropy", "weight": [{"deep": {"_target_": target}}]},
        ):
            components = Components(imports)
            for do in (components.check, components.make):
                with pytest.raises(ConfigError) as caught:
                    do(spec, registry.criteria, "criterion")
                text = str(caught.value)
                assert "_target_" in text or "takes no option" in text, text
    with pytest.raises(ConfigError, match=r"allow_targets|there is no|not a class or function"):
        Targets().find(target, "the.key._target_")


@pytest.mark.parametrize(
    ("target", "wider", "home"),
    [
        ("collections.OrderedDict", "collections", ""),
        ("torch.nn.functional.torch.load", "torch.serialization", "torch.serialization.load"),
        ("torch.hub.load", "torch.hub", ""),
        ("torch.utils.data.datapipes.iter.FileOpener", "torch.utils.data.datapipes",
         "torch.utils.data.datapipes.iter.fileopener.FileOpenerIterDataPipe"),
        ("phaseloop.load_weights", "phaseloop.engine.checkpoint",
         "phaseloop.engine.checkpoint.weights.load_weights"),
        ("posixpath.os.system", "posix", ""),
    ],
)  # fmt: skip
def test_the_message_says_what_to_add(target: str, wider: str, home: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Targets().find(target, "k")
    assert f"add {target!r} to allow_targets if you trust it" in str(caught.value)
    assert not home or f"(it is {home})" in str(caught.value)
    assert callable(Targets(allow_targets=[target]).find(target, "k"))
    top = target.split(".")[0]
    assert callable(Targets(allow_targets=[top, wider]).find(target, "k"))
    with pytest.raises(ConfigError):  # one thing opens no other
        Targets(allow_targets=[target]).find(f"{target}er", "k")


ALLOWED_TARGETS = [
    "torch.nn.Linear",
    "torch.nn.modules.linear.Linear",
    "torch.nn.functional.relu",
    "torch.optim.SGD",
    "torch.optim.lr_scheduler.StepLR",
    "torch.utils.data.default_collate",
    "torch.utils.data.TensorDataset",
    "torchmetrics.classification.MulticlassF1Score",
    "torchmetrics.MeanMetric",
    "phaseloop.Accuracy",
    "phaseloop.TensorData",
    "phaseloop.hooks.early_stop.EarlyStop",
    "phaseloop.train_steps.standard.standard_train_step",
    "phaseloop.recipes.digits.DigitsCNN",
]


@pytest.mark.parametrize("target", ALLOWED_TARGETS)
def test_what_a_target_may_be(target: str) -> None:
    assert callable(Targets().find(target, "k"))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_walk_from_an_allowed_package_leaves_it(data: st.DataObject) -> None:
    """From any allowed module, along any attributes: what is found lives in an allowed package."""
    starts = ("torch.nn.functional", "torch.utils.data.dataloader", "torch.optim.optimizer")
    start = data.draw(st.sampled_from([*ALLOWED, *starts, "phaseloop.hooks"]))
    here: Any = importlib.import_module(start)
    path = start
    for _step in range(data.draw(st.integers(1, 4))):
        names = sorted(name for name in dir(here) if name.isidentifier())
        if not names:
            break
        name = data.draw(st.sampled_from(names))
        try:
            here = getattr(here, name)
        except Exception:
            break
        path = f"{path}.{name}"
    try:
        found = Targets().find(path, "k")
    except ConfigError:
        return
    module = found.__module__
    assert any(module == a or module.startswith(f"{a}.") for a in ALLOWED), (path, module)
    assert not module.startswith(("torch.utils.data.datapipes", "torchmetrics.multimodal"))
    assert isinstance(found, type) or module.split(".")[0] == "torch" or "phaseloop" in module


# --- whole configurations ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Bomb:
    """Unpickled as it would like to be, it makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("proof",)


EVIL_CALL = "{_target_: os.mkdir, path: proof}"
EVIL = {
    "model": f"model: {EVIL_CALL}",
    "criterion": f"criterion: {EVIL_CALL}",
    "optimizer": f"optimizer: {EVIL_CALL}",
    "hook": f"hooks: {{x: {EVIL_CALL}}}",
    "meter": f"meters: {{test: {{x: {EVIL_CALL}}}}}",
    "backend": f"backend: {EVIL_CALL}",
    "dataset": f"data: {{train: {{dataset: {EVIL_CALL}, batch_size: 4}}}}",
    "collate": f"data: {{train: {{collate: {EVIL_CALL}}}}}",
    "step": f"train_step: {EVIL_CALL}",
    "schedule": f"schedule: {EVIL_CALL}",
    "deep": f"optimizer: {{name: sgd, lr: {EVIL_CALL}}}",
    "deeper": f"data: {{train: {{dataset: {{name: tiny_data, samples: [{EVIL_CALL}]}}}}}}",
    "hydra": f"hydra: {{callbacks: {{x: {EVIL_CALL}}}}}",
    "launcher": "hydra: {launcher: {_target_: os.mkdir}}",
    "resolver": "seed: ${oc.eval:1}",
    "yaml": 'model: !!python/object/apply:os.mkdir ["proof"]',
    "pickled": "criterion: {_target_: torch.utils.data.datapipes.utils.decoder.basichandlers, "
    "extension: pickle, data: !!binary DATA}",
}


@pytest.mark.parametrize("name", EVIL)
def test_a_configuration_runs_nothing(here: Path, capsys: Any, name: str) -> None:
    text = EVIL[name].replace("DATA", base64.b64encode(pickle.dumps(Bomb())).decode())
    head = "# @package _global_\ndefaults: [tiny, _self_]\n"
    (here / "configs" / "config" / "evil.yaml").write_text(f"{head}{text}\n")
    before = sorted(os.listdir(here))
    assert run_here(["config=evil"]) == WRONG_CONFIG
    assert "wrong configuration" in capsys.readouterr().err
    assert not (here / "proof").exists()
    assert sorted(set(os.listdir(here)) - {"runs"}) == before


def test_what_hydra_would_make_is_refused_and_not_made(here: Path, capsys: Any) -> None:
    """In a sweep, and where Hydra shows a configuration, too."""
    evil = f"# @package _global_\ndefaults: [tiny, _self_]\n{EVIL['hydra']}\n"
    (here / "configs" / "config" / "evil.yaml").write_text(evil)
    ended = cli.run(["--multirun", "config=evil", "seed=0,1", "phases.epochs=1"], here)
    assert ended.returncode != 0
    assert "hydra: Hydra's own settings are for the command line" in ended.stderr
    cli.run(["--cfg", "job", "config=evil"], here)
    assert not (here / "proof").exists()
    assert run_here(["config=tiny", "hydra.verbose=true"]) == WRONG_CONFIG
    assert "not for the command line" not in capsys.readouterr().out


def test_imports_and_allow_targets_are_the_keys_that_open(here: Path) -> None:
    Path("own_parts.py").write_text("import os\n\n\ndef loss():\n    os.mkdir('loss')\n")
    spec = {"_target_": "own_parts.loss"}
    with pytest.raises(ConfigError, match=r"add 'own_parts.loss' to allow_targets"):
        Components().make(spec, registry.criteria, "criterion")
    Components(["./own_parts.py"]).make(spec, registry.criteria, "criterion")
    assert (here / "loss").exists()
    with pytest.raises(ConfigError, match=r"posix\.mkdir"):  # what it imports is not its own
        Components(["./own_parts.py"]).make(
            {"_target_": "own_parts.os.mkdir", "path": "proof"}, registry.criteria, "criterion"
        )
    assert not (here / "proof").exists()


def test_safe_layers_can_still_be_made() -> None:
    spec = {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}
    assert isinstance(Components().make(spec, registry.criteria, "c"), nn.CrossEntropyLoss)
    assert torch.is_grad_enabled()
