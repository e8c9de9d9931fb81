"""Export a run's weights: ``python tools/export.py RUN_OR_CHECKPOINT OUT.safetensors``.

A checkpoint is verified, and the model's weights in it, averaged or raw, are written to one file
that needs nothing of phaseloop: safetensors, or ``torch.save`` of the ``state_dict``. Neither data
nor the model's code is needed. Exit codes: 0 done; 1 an error; 2 wrong arguments.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError

from phaseloop.engine.disk import replace
from phaseloop.engine.errors import CheckpointError, ConfigError, nearest
from phaseloop.engine.urls import Place, check_url, is_url, place
from phaseloop.tools import one_process
from phaseloop.tools.run import DONE, exit_code, words_given

if TYPE_CHECKING:
    from phaseloop.engine.checkpoint.store import Saved

__all__ = ["Exported", "export"]

USAGE = """\
usage: python tools/export.py RUN OUT [key=value ...]

  RUN               a run's folder, such as runs/digits, or the folder of a checkpoint
  OUT               the file: NAME.safetensors, or NAME.pt
  which=best        which checkpoint of a run: newest (the default), best, or its name
  averages=raw      the raw weights; or the name of the hook whose averages are taken.
                    Default: what the run tested
  dtype=float16     another type for floating-point tensors: float16, bfloat16, float32, float64
  format=pt         safetensors or pt; default: by the name of OUT
  force=true        replace OUT
"""

RAW = "raw"
_FORMATS = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt"}
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_OPTIONS = ("which", "averages", "dtype", "format", "force")
_OWN = re.compile(rf"^\+{{0,2}}({'|'.join(_OPTIONS)})=(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        checkpoint: where the weights lay.
        weights: ``raw``, or the hook whose averages they are.
        tensors: how many; a shared one counts once.
        elements: numbers in all of them.
        tied: names that are left out of a safetensors file, each with that of its tensor.
    """

    path: Path
    checkpoint: Place
    weights: str
    tensors: int
    elements: int
    tied: Mapping[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(run(words_given(arguments, lambda: USAGE)))


def run(words: Sequence[str]) -> int:
    """The export that the words describe; the exit code."""
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    own = _options(words)
    rest = [word for word in words if not _OWN.match(word)]
    if len(rest) != 2 or any(word.startswith("-") for word in rest):
        _name_the_wrong(rest)
        given = ", ".join(map(repr, rest)) or "nothing"
        raise ConfigError("", f"give a run or a checkpoint, and the file to write; got {given}")
    force = {"true": True, "false": False}.get(own.pop("force", "false").lower())
    if force is None:
        raise ConfigError("force", "it is true or false")
    one_process.check_launcher("an export")
    done = export(rest[0], rest[1], force=force, **own)
    kind = "raw weights" if done.weights == RAW else f"averages of hooks.{done.weights}"
    print(f"exported    {kind} of {done.checkpoint}")
    print(f"to          {done.path}: {done.tensors} tensors, {done.elements:,} numbers")
    for name, first in done.tied.items():
        print(f"            {name} is the tensor {first}")
    return DONE


def _options(words: Sequence[str]) -> dict[str, Any]:
    """The words that are options, each name once."""
    own: dict[str, Any] = {}
    for match in filter(None, map(_OWN.match, words)):
        if match[1] in own:
            raise ConfigError(match[1], f"is given twice, as {own[match[1]]!r} and {match[2]!r}")
        own[match[1]] = match[2]
    return own


def _name_the_wrong(rest: Sequence[str]) -> None:
    """Raises ConfigError for a word that looks like an option and is none, nor a path."""
    for word in rest:
        name = (word.partition("=")[0]).lstrip("+")
        if "=" in word and re.fullmatch(r"\w+", name) and not os.path.exists(word):
            hint = nearest(name, _OPTIONS)
            raise ConfigError(
                name, f"there is no such option.{hint} There are: {', '.join(_OPTIONS)}"
            )


def export(
    folder: str | Path,
    out: str | Path,
    *,
    which: str | None = None,
    averages: str | None = None,
    dtype: str | None = None,
    format: str | None = None,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the weights of a checkpoint to one file.

    Args:
        folder: a run's, or a checkpoint's; or its URL.
        out: the file, on this machine and not among checkpoints; it is there whole or not at all.
        which: of a run: ``newest`` (also None), ``best``, or a checkpoint's name.
        averages: ``raw``, or the name of the hook whose averages are taken; None: what the run
            tested, by its configuration.
        dtype: of floating-point tensors; None: as they are.
        format: ``safetensors`` or ``pt``; None: by the ending of ``out``.
        force: replace ``out``.
        storage_options: what the file system of a URL takes.

    Raises:
        ConfigError: there is no such checkpoint or average, it is not known which one was tested,
            ``out`` exists or lies among checkpoints, or what is in the checkpoint does not go into
            this format.
    """
    out = _on_disk(str(out))
    format = _format(out, format)
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError("dtype", f"{dtype!r} is not one of {', '.join(_DTYPES)}")
    if out.exists() and not force:
        raise ConfigError("force", f"{out} exists; force=true replaces it")
    if not out.absolute().parent.is_dir():
        raise ConfigError("out", f"there is no folder {out.absolute().parent}")
    check_url(str(folder), "run")
    where = place(str(folder), storage_options)
    if isinstance(where, Path) and not where.is_dir():
        raise ConfigError("run", f"there is no folder {folder}")

    import torch

    from phaseloop.engine.checkpoint import choosing

    _check_apart(out, choosing.checkpoints_at(where))
    saved = choosing.checkpoint_at(where, which, "")
    weights = averages if averages is not None else _tested(saved)
    try:
        state = choosing.model_state(saved, None if weights == RAW else weights, "")
    except CheckpointError as error:
        raise ConfigError("averages", str(error)) from None
    tied = choosing.aliases(state)
    if dtype is not None:
        state = {n: _converted(v, getattr(torch, dtype)) for n, v in state.items()}
        state.update({name: state[first] for name, first in tied.items()})
    writes = _write_safetensors if format == "safetensors" else _write_pt
    writes(out, state, tied, _facts(saved, weights))
    tensors = [v for n, v in state.items() if isinstance(v, torch.Tensor) and n not in tied]
    count = sum(tensor.numel() for tensor in tensors)
    return Exported(out, saved.path, weights, len(tensors), count, tied)


def _on_disk(out: str) -> Path:
    if is_url(out):
        raise ConfigError(
            "out", f"{out} is a URL; the file is written to a disk of this machine: give a path"
        )
    check_url(out, "out")
    path = place(out)
    assert isinstance(path, Path)
    return path


def _check_apart(out: Path, checkpoints: Place | None) -> None:
    """Raises ConfigError for a file in a checkpoint or among those of a run."""
    from phaseloop.engine.checkpoint.contents import STATE
    from phaseloop.engine.checkpoint.names import MANIFEST, is_name

    own = checkpoints.resolve() if isinstance(checkpoints, Path) else None
    parent = out.absolute().parent.resolve()
    if (parent / MANIFEST).exists() and (parent / STATE).exists():  # one that has another name
        inside = True
    else:
        inside = any(
            is_name(folder.name)
            or folder == own
            or (folder.name == "checkpoints" and any(map(is_name, os.listdir(folder))))
            for folder in (parent, *parent.parents)
        )
    if inside:
        raise ConfigError(
            "out", f"{out} is among checkpoints, which hold nothing else; give another folder"
        )


def _format(out: Path, given: str | None) -> str:
    ending = _FORMATS.get(out.suffix)
    if given is not None and given not in _FORMATS.values():
        raise ConfigError("format", f"{given!r} is not safetensors or pt")
    if given and ending and given != ending:
        raise ConfigError("format", f"{given} does not go with the name {out.name}")
    if not (given or ending):
        raise ConfigError("format", f"{out.name} does not tell: safetensors or pt")
    return str(given or ending)


def _tested(saved: Saved) -> str:
    """Whose weights the run's tests looked at.

    Raises:
        ConfigError: the run has averages, and was made in Python: no configuration says.
    """
    from phaseloop.engine.checkpoint import store
    from phaseloop.engine.checkpoint.contents import STATE

    state = store.load(saved, STATE)
    kept = [name for name, values in state["averages"].items() if values]
    if not kept:
        return RAW
    if not state["config"]:
        raise ConfigError(
            "averages", f"the run has those of {', '.join(kept)}: say which, or averages=raw"
        )
    hooks: dict[str, Any] = state["config"]["hooks"]
    options = {name: hooks.get(name) or {} for name in kept}
    if strange := [n for n in kept if options[n].get("name", n) != "average"]:
        raise ConfigError(
            "averages", f"whether those of {', '.join(strange)} were tested is not known: say which"
        )
    return next((name for name in kept if options[name].get("test", True)), RAW)


def _facts(saved: Saved, weights: str) -> dict[str, str]:
    """What the file says about itself; text only, as safetensors has it."""
    import phaseloop

    run = saved.path.parent.parent.name
    return {
        "format": "pt",  # what other readers of safetensors ask for: the tensors are torch's
        "phaseloop": phaseloop.__version__,
        "run": run,
        "checkpoint": saved.path.name,
        "updates": str(saved.manifest["updates"]),
        "sha256": str(saved.manifest["sha256"]),
        "weights": weights if weights == RAW else f"averages of hooks.{weights}",
    }


def _converted(value: Any, dtype: Any) -> Any:
    import torch

    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _write_safetensors(
    out: Path, state: Mapping[str, Any], tied: Mapping[str, str], facts: dict[str, str]
) -> None:
    import safetensors.torch
    import torch

    from phaseloop.engine.checkpoint.source import TIED

    if other := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(
            "format",
            f"{', '.join(other)}: safetensors has tensors only; use format=pt",
        )
    # Views of one another would be refused; and of what is shared, one is enough.
    tensors = {n: v.detach().contiguous().clone() for n, v in state.items() if n not in tied}
    if tied:
        facts = {**facts, TIED: json.dumps(dict(tied))}
    # Not by save_file, whose files only their owner can read.
    _write(out, lambda file: file.write(safetensors.torch.save(tensors, metadata=facts)))


def _write_pt(
    out: Path, state: Mapping[str, Any], tied: Mapping[str, str], facts: dict[str, str]
) -> None:
    import torch

    # A plain state_dict, for any program: it has no place for the facts.
    _write(out, lambda file: torch.save(dict(state), file))


def _write(out: Path, write: Callable[[IO[bytes]], object]) -> None:
    try:
        replace(out, write)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{out} could not be written: {error}") from error


if __name__ == "__main__":
    main()
