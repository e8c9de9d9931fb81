"""Starting: what the first update does not need is not imported before it."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from phaseloop.tools import importing
from tests.rigs import cli

# The command line in an interpreter of its own: what it has loaded after the import of phaseloop,
# when its keys are right, and at the first update; and how often it has collected in between.
CODE = """
import contextlib, gc, sys
import phaseloop
print("phaseloop", *sys.modules)

from phaseloop.tools import importing, run
print("command", *sys.modules)

runs = []
gc.callbacks.append(lambda phase, about: runs.append(phase))
uncollected = importing.uncollected

@contextlib.contextmanager
def counted():
    before = len(runs)
    with uncollected():
        yield
        print("collections", len(runs) - before)

importing.uncollected = counted
run.main(["config=digits", "run.dir=run", "+hooks.first={}",
          "imports=[phaseloop.recipes.digits,./first.py]"])
"""

HOOK = """
import gc, os, sys
from phaseloop import Hook, register_hook

@register_hook("first")
class First(Hook):
    only_watches = True

    def on_update(self, task):
        print("\\nupdate", *sys.modules)
        print("collects", gc.isenabled(), flush=True)
        os._exit(0)
"""

HEAVY = {"torch", "numpy", "hydra", "omegaconf", "yaml"}
"""Nothing of these for a name that is only looked at."""

# Tenths of a second each, for what is shown, drawn, counted or reached later, or never.
LATE = {"matplotlib", "fvcore.nn", "torchmetrics", "s3fs", "torch_xla", "horovod", "submitit",
        "torch._inductor.compile_fx"}  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """By first word, the other words of each line."""
    folder = tmp_path_factory.mktemp("startup")
    (folder / "first.py").write_text(HOOK)
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=folder, env=cli.environment(), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[list[str]]] = {}
    for first, *words in filter(None, map(str.split, done.stdout.splitlines())):
        found.setdefault(first, []).append(words)
    return found


def test_importing_phaseloop_imports_nothing_that_takes_time(
    said: dict[str, list[list[str]]],
) -> None:
    (modules,) = said["phaseloop"]
    assert sorted(HEAVY & set(modules)) == []


def test_the_command_checks_its_keys_before_torch_is_there(
    said: dict[str, list[list[str]]],
) -> None:
    (modules,) = said["command"]
    assert "torch" not in modules


def test_nothing_is_imported_before_the_first_update_that_it_does_not_need(
    said: dict[str, list[list[str]]],
) -> None:
    (modules,) = said["update"]
    assert "torch" in modules
    assert sorted(LATE & set(modules)) == []


def test_nothing_is_collected_while_torch_is_imported_and_all_after_it(
    said: dict[str, list[list[str]]],
) -> None:
    assert said["collections"] == [["0"], ["0"]]
    assert said["collects"] == [["True"]]


def test_where_torch_is_there_already_the_collector_is_left_alone() -> None:
    import torch._dynamo  # noqa: F401

    frozen = gc.get_freeze_count()
    with importing.uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
