"""Initial weights: a model's tensors from elsewhere, by name, with nothing left unsaid."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from phaseloop.engine.backends.primary import on_primary
from phaseloop.engine.checkpoint import choosing, source
from phaseloop.engine.checkpoint.fitting import WeightsReport, compare, hint, without_values
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.run_folder import ONLY_FILE
from phaseloop.engine.shards import shares_of
from phaseloop.engine.urls import Place, check_url, place

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

KEY = "model.weights"
FACTS = "initial_weights"
"""Where a run's identity says what it began with."""

_SHOWN = 3  # names of each kind on the console; all of them are in log.txt


@dataclass
class Weights:
    """Which weights a training starts from, and how their names become the model's.

    Names are changed in this order: ``remove_prefix``, ``rename``, ``add_prefix``. Patterns are
    shell patterns of the model's names, or of modules with all that is below them:
    ``backbone.*``, ``head``.

    Args:
        path: a file of ``torch.save`` or of safetensors; or the folder of a checkpoint, or of a
            run; each may be a URL (``s3://bucket/file.pt``), which is reached with
            ``run.storage_options``.
        at: where in a file the state lies: ``state_dict``, ``model.trunk``.
        which: of a run's folder: ``newest`` (the default), ``best``, or a checkpoint's name.
        averages: of a checkpoint: those that the hook of this name kept, and not the raw weights.
        remove_prefix: taken off the names that begin with it: ``module.``
        rename: regular expression to what it is replaced by, as ``re.sub`` does, in this order.
        add_prefix: put before all names: ``backbone.``
        include: only these are loaded; all others are left as they are, and not asked for.
        allow: these may be missing, too many, or of another shape, and are then left as they are.
    """

    path: str
    at: str | None = None
    which: str | None = None
    averages: str | None = None
    remove_prefix: str = ""
    rename: dict[str, str] = field(default_factory=dict)
    add_prefix: str = ""
    include: list[str] = field(default_factory=lambda: ["*"])
    allow: list[str] = field(default_factory=list)

    def check(self, key: str = KEY) -> None:
        """Raises ConfigError for what is wrong whatever the file holds."""
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"{key}.path", f"{self.path!r} is no path")
        check_url(self.path, f"{key}.path")
        for name in ("include", "allow"):
            patterns = getattr(self, name)
            if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
                raise ConfigError(f"{key}.{name}", f"{patterns!r} is not a list of patterns")
        if not self.include:
            raise ConfigError(f"{key}.include", "nothing would be loaded")
        for name in ("remove_prefix", "add_prefix"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{key}.{name}", f"{getattr(self, name)!r} is not a string")
        for pattern in self.rename:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{key}.rename", f"{pattern!r} is no regular expression: {error}"
                ) from None

    @property
    def facts(self) -> dict[str, Any]:
        """All that was said, but for the path, as plain Python."""
        default = Weights("")
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "path" and value != getattr(default, name)
        }


def load_weights(
    model: nn.Module,
    weights: Weights | str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    key: str = "weights",
) -> WeightsReport:
    """Load weights from elsewhere into a model; whatever is wrong, nothing of it has changed then.

    Args:
        model: the bare model.
        weights: where they are, or just the path.
        storage_options: what the file system of a URL takes.
        key: where this stands in a configuration, for messages.

    Returns:
        What came of every name; ``print`` shows it.

    Raises:
        ConfigError: the file cannot be read or would run code; a name is missing, too many, or of
            another shape, and no pattern of ``allow`` names it; or no name matches at all.
    """
    weights = Weights(weights) if isinstance(weights, str) else weights
    weights.check(key)
    where = place(weights.path, storage_options)
    return _load(model, weights, _read(weights, where, key), key)


def start(task: Task) -> None:
    """At the very start of a run: load what it begins with, and note that in its identity."""
    if task.weights is None:
        return
    found = _found(task, task.weights)
    _load(task.bare_model, task.weights, found, KEY, log_it=True)
    task.identity[FACTS] = {
        "path": task.weights.path,
        "sha256": found.sha256,
        **task.weights.facts,
    }


def _found(task: Task, weights: Weights) -> source.Source:
    """The weights as they are read here: of a run, those of the checkpoint that the primary took.

    A run that still goes on has another newest one at every look.
    """
    where, mine = place(weights.path, task.run.storage_options), []

    def read_and_tell() -> str | None:
        mine.append(_read(weights, where, KEY))
        return mine[0].checkpoint

    which = on_primary(task.backend, read_and_tell)
    if mine:
        return mine[0]
    return _read(dataclasses.replace(weights, which=which), where, KEY)


def changes(task: Task, before: Mapping[str, Any]) -> list[str]:
    """On a resume: how what is asked for differs from what the run began with.

    The path may be another if the bytes there are the same. Where it is the same, the file is not
    looked at: it may be gone.

    Args:
        before: the identity of the run; what it says of its weights is taken over.
    """
    then, now = before.get(FACTS), task.weights
    if then is None or now is None:
        if then is not None:
            return [f"{KEY}: {then['path']!r} -> absent"]
        return [] if now is None else [f"{KEY}: absent -> {now.path!r}"]
    options = {k: v for k, v in then.items() if k not in ("path", "sha256")}
    found = [
        f"{KEY}.{name}: {options.get(name)!r} -> {now.facts.get(name)!r}"
        for name in dict.fromkeys([*options, *now.facts])
        if options.get(name) != now.facts.get(name)
    ]
    if now.path != then["path"]:
        found += _other_bytes(now, then, place(now.path, task.run.storage_options))
    task.identity[FACTS] = then
    return found


def _other_bytes(now: Weights, then: Mapping[str, Any], where: Place) -> list[str]:
    said = f"{KEY}.path: {then['path']!r} -> {now.path!r}"
    try:
        if choosing.sha256_of(where, now.which, now.averages, KEY) == then["sha256"]:
            return []
    except ConfigError as error:
        return [f"{said}, which may hold other weights ({error})"]
    return [f"{said}, which holds other weights"]


def _read(weights: Weights, where: Place, key: str) -> source.Source:
    is_folder = source.is_folder(where)
    for name in ("which", "averages") if not is_folder else ("at",):
        if getattr(weights, name) is not None:
            kind = "file" if is_folder else "checkpoint or a run"
            raise ConfigError(f"{key}.{name}", f"is for a {kind}, and {weights.path} is none")
    if is_folder:
        return choosing.read_checkpoint(where, weights.which, weights.averages, key)
    return source.read_file(where, weights.at, key)


def _load(
    model: nn.Module, weights: Weights, found: source.Source, key: str, log_it: bool = False
) -> WeightsReport:
    chosen, report = compare(model, weights, found, key)
    problems = report.problems(weights.allow)
    if log_it:
        log.info("%s", report, extra=ONLY_FILE)
    if problems or not report.loaded:
        raise ConfigError(key, _refusal(report, problems, hint(model, weights, found, report)))
    if log_it:
        for line in report.lines(_SHOWN):
            log.info("%s", line)
    if lost := without_values(chosen):
        log.warning(
            "%s: %s has NaN in tensors that are loaded: %s", key, found.place, lost, extra=ALIKE
        )
    state = OrderedDict(shares_of(chosen, model.state_dict()))
    # Names and values are as this version of each module has them.
    state._metadata = getattr(model.state_dict(), "_metadata", {})  # type: ignore[attr-defined]
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(key, f"{found.place} was not loaded: {error}") from error
    return report


def _refusal(report: WeightsReport, problems: list[str], hint: str) -> str:
    count = f"{report.count} tensors of the model"
    if not report.loaded:
        problems = problems or ["no name matches"]
        return f"{report.place} has {count}: {'; '.join(problems)}.{hint}"
    return (
        f"{report.place} does not fit, it has {count}: {'; '.join(problems)}.{hint} "
        f"What may differ is named in allow: [PATTERN, ...]"
    )
