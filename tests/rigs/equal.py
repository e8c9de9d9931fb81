"""EQ: an interrupted run equals the uninterrupted one, bit for bit, and what differs if not."""

from __future__ import annotations

import itertools
import json
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.checkpoint import rank_state, store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from tests.rigs import process, r1

# What an interruption may change: when and how often a checkpoint was written, how many bytes a
# file of lines has (its lines hold the time of day), and the machine.
MAY_DIFFER = (
    "state.progress.saves",
    "state.hooks.checkpoint.written",
    "state.hooks.checkpoint.archived",
    "state.hooks.console.seconds",
    "state.hooks.console.samples",
    "state.hooks.console.resumes",
    "state.hooks.console.whole",
    "state.hooks.metrics_file",
    "state.hooks.tensorboard",
    "state.environment",
)
TIMES = ("time",)
"""Fields of a logged row that tell the time."""
COSTS = ("save", "start")
"""Events that tell when and at what cost this machine wrote a checkpoint, and when it began."""


def assert_eq(reference: Path, folder: Path) -> None:
    """Two finished runs are equal in everything that a run is about.

    Compares the newest checkpoints (parameters, buffers, optimizer state, random states, meters,
    best and early-stop state, hooks, progress), ``status.json``, the rows of ``metrics.jsonl``,
    and what the probes wrote: see :func:`probe_of`.

    Raises:
        AssertionError: naming everything that differs.
    """
    found = list(differences(reference, folder))
    assert not found, "not equal:\n  " + "\n  ".join(found)


_references: dict[bytes, Path] = {}


def reference(**options: Any) -> Path:
    """The folder of an undisturbed run of R1 with these options of :func:`tests.rigs.r1.train`.

    Made in a new process when it is first asked for, and kept while the tests last.
    """
    key = pickle.dumps(sorted(options.items()))
    if key not in _references:
        folder = Path(tempfile.mkdtemp(dir=process.scratch())) / "reference"
        process.result(r1.train, folder, probe_of(folder), **options)
        _references[key] = folder
    return _references[key]


def undisturbed(**options: Any) -> Path:
    """A reference for a run with these options that may save at other times: that changes nothing.

    So runs that differ in this alone have one reference.
    """
    save = {k: v for k, v in options.pop("save", {}).items() if k in ("keep_best", "metric")}
    return reference(**options, **({"save": save} if save else {}))


def probe_of(folder: Path) -> Path:
    """Where the probe of the run in ``folder`` writes: beside the folder."""
    return folder.with_name(f"{folder.name}.probe")


def newest(folder: Path) -> store.Saved:
    """The newest checkpoint of a run, which must be whole.

    Raises:
        AssertionError: there is none.
    """
    checkpoints = store.Store(folder / "checkpoints")
    names = checkpoints.names()
    assert names, f"no checkpoint in {folder}"
    return store.verified(checkpoints.folder / names[-1])


def state_of(saved: store.Saved) -> dict[str, Any]:
    """``state.pt`` of a checkpoint."""
    state: dict[str, Any] = store.load(saved, STATE)
    return state


def rows(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The logged rows without their times, and without what saves cost.

    A line that is no row is an error.
    """
    text = (folder / file).read_text()
    assert text == "" or text.endswith("\n"), f"half a line at the end of {folder / file}"
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {k: v for k, v in row.items() if k not in TIMES}
        for row in found
        if row.get("event") not in COSTS
    ]


def differences(reference: Path, folder: Path) -> Iterator[str]:
    """Everything that differs, one line each."""
    a, b = newest(reference), newest(folder)
    yield from differ("model", store.load(a, MODEL), store.load(b, MODEL))
    yield from differ("state", _comparable(state_of(a)), _comparable(state_of(b)))
    yield from differ("status", _status(reference), _status(folder))
    yield from differ("rows", rows(reference), rows(folder))
    for rank in itertools.count():
        one, other = (r1.probe_of_rank(probe_of(run), rank) for run in (reference, folder))
        if not one.exists():
            break
        yield from _probes_differ(one, other)


def differ(path: str, a: Any, b: Any) -> Iterator[str]:
    """Where two trees of tensors and plain Python are not the same, bit for bit."""
    if path in MAY_DIFFER:
        return
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} and {type(b).__name__}: {_short(a)}, {_short(b)}"
    elif isinstance(a, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield f"{path}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        elif not torch.equal(_bits(a), _bits(b)):
            count = int((_bits(a) != _bits(b)).reshape(a.numel(), -1).any(dim=1).sum())
            yield f"{path}: {count} of {a.numel()} elements differ: {_short(a)}, {_short(b)}"
    elif isinstance(a, Mapping):
        for key in dict.fromkeys([*a, *b]):
            if key not in a or key not in b:
                yield f"{path}.{key}: only in the {'reference' if key in a else 'other'}"
            else:
                yield from differ(f"{path}.{key}", a[key], b[key])
    elif isinstance(a, Sequence) and not isinstance(a, str):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} entries: {_short(a)}, {_short(b)}"
        for number, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differ(f"{path}.{number}", x, y)
    elif a != b and not (a != a and b != b):  # a NaN is equal to a NaN here
        yield f"{path}: {_short(a)} and {_short(b)}"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, since NaN differs from itself and -0 does not from 0."""
    whole = tensor.contiguous()  # though with one element its stride may be anything
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    """The best checkpoints without their names, which count the saves; ranks by their own."""
    ranks = [rank_state.of_rank(state, rank) for rank in range(1, rank_state.count(state))]
    state = {**state, "others": ranks}
    hooks = dict(state["hooks"])
    if "checkpoint" in hooks:
        best = [entry[:3] for entry in hooks["checkpoint"]["best"]]
        hooks["checkpoint"] = {**hooks["checkpoint"], "best": best}
    return {**state, "hooks": hooks}


def _status(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return {key: status[key] for key in ("status", "updates", "final", "best")}


_KEY = ("kind", "phase", "epoch", "update", "windows", "roll_backs")


def _probes_differ(reference: Path, probe: Path) -> Iterator[str]:
    """Every line of every process, also of what was done twice, is one of the reference's."""
    expected = {_key(line): _content(line) for line in _events(reference)}
    found = set()
    for line in _events(probe):
        key = _key(line)
        found.add(key)
        if key not in expected:
            yield f"probe: {key} is not in the reference"
        else:
            yield from differ(f"probe {key}", expected[key], _content(line))
    for key in expected.keys() - found:
        yield f"probe: {key} is missing"


def _events(probe: Path) -> list[dict[str, Any]]:
    return [line for line in r1.lines(probe) if line["kind"] not in ("started", "resumed")]


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in _KEY)


def _content(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k != "process" and k not in _KEY}


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
