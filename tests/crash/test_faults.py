"""CK-a, CK-c for every operation on the file system: it fails, is cut short, or is the last one.

A small run that saves, prunes, logs and writes its status, from its start and from a checkpoint
beside which a half written one lies. Its operations are counted; then each is disturbed by itself.
The run goes on, or ends with an error that is told; what has a final name is whole; what was logged
as saved is there; and the same command brings it to the end of an undisturbed run.
"""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from phaseloop.engine.checkpoint import store
from tests.crash import command, features, scenario
from tests.crash.faulty_fs import WRITING, Plan
from tests.rigs import equal

pytestmark = pytest.mark.crash

ACTIONS = ("error", "full", "short", "kill", "kill_half")
"""Killed after an operation is killed before the next one."""


def config(tensorboard: bool) -> dict[str, Any]:
    """Two epochs of two updates with a test, saved after each second update."""
    given = features.config(
        features.settled({"every_updates": 2, "tensorboard": tensorboard, "test": "epochs"}), 0.0
    )
    given["phases"]["epochs"] = 2
    given["data"]["train"]["dataset"]["count"] = 2 * features.BATCH
    return given


class Subject:
    """What is disturbed: a folder to begin with, its undisturbed end, and the operations between.

    Attributes:
        operations: kind and path of each.
    """

    def __init__(self, tmp: Path, resumed: bool, tensorboard: bool = False) -> None:
        self.whole = command.lay_out(tmp / "whole", config(tensorboard))
        self.begun = command.lay_out(tmp / "begun", config(tensorboard))
        self.resumed = resumed
        told = self._count(self.whole)
        for file in self.whole.glob("composed-*"):
            shutil.copy(file, self.begun)
        self.operations = told
        if resumed:
            half = next(n for n, line in enumerate(told, 1) if "update_000000004" in line)
            kill = Plan(str(self.begun / "run"), do="kill_after", at=half + 5)
            assert command.run(self.begun, faults=kill)[0] == -scenario.KILL
            assert scenario.left_over(self.begun / "run")
            counted = tmp / "counted"
            shutil.copytree(self.begun, counted)
            self.operations = self._count(counted)

    @staticmethod
    def _count(folder: Path) -> list[str]:
        log = folder / "operations"
        code, output = command.run(folder, faults=Plan(str(folder / "run"), log=str(log)))
        assert code == 0, output
        return log.read_text().splitlines()

    def disturb(self, folder: Path, number: int, action: str) -> list[str]:
        """Disturb one operation and go on; everything that is not as promised."""
        shutil.copytree(self.begun, folder)
        run = folder / "run"
        faults = Plan(str(run), do=action, at=number, number=_number(number))
        code, output = command.run(folder, faults=faults)
        way = "kill" if action.startswith("kill") else "error"
        wrong = [*scenario.wrong_code(way, code, output), *scenario.wrong_folder(run)]
        if self.resumed and not store.Store(run / "checkpoints").names():
            wrong.append("no checkpoint is left")
        if code != 0 and not wrong:
            code, output = command.run(folder)
            if code != 0:
                wrong.append(f"the same command again ended with {code}:\n{output}")
        if not wrong:
            wrong += equal.differences(self.whole / "run", run)
        shutil.rmtree(folder)
        return wrong

    def disturbances(self) -> list[tuple[int, str]]:
        """All of them: number of the operation, action."""
        return [
            (number, action)
            for number, line in enumerate(self.operations, 1)
            for action in ACTIONS
            if line.startswith("write") or action not in ("short", "kill_half")
            if line.startswith(WRITING) or action != "full"
        ]


def _number(operation: int) -> int:
    """Of the error: another one for each operation."""
    return (errno.EIO, errno.ENOSPC, errno.EACCES)[operation % 3]


def check(tmp: Path, subject: Subject, chosen: list[tuple[int, str]]) -> None:
    """Each by itself; all that is wrong is told at once."""
    found = []
    for number, action in chosen:
        try:
            wrong = subject.disturb(tmp / f"{number}-{action}", number, action)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        place = subject.operations[number - 1].replace(str(subject.begun.parent), "")
        found += [f"{action} at operation {number}, {place}: {what}" for what in wrong]
    assert not found, "\n\n".join(found)


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A run from its start."""
    return Subject(tmp_path_factory.mktemp("anew"), resumed=False)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A run from where it was killed in a save."""
    return Subject(tmp_path_factory.mktemp("resumed"), resumed=True)


BOTH = pytest.mark.parametrize("name", ["anew", "resumed"])


@BOTH
def test_ck_a_an_operation_of_a_run_is_disturbed(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    subject = request.getfixturevalue(name)
    check(tmp_path, subject, random.Random(name).sample(subject.disturbances(), 12))


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
@BOTH
def test_ck_a_each_operation_of_a_run_is_disturbed(
    tmp_path: Path, name: str, action: str, request: pytest.FixtureRequest
) -> None:
    subject = request.getfixturevalue(name)
    check(tmp_path, subject, [one for one in subject.disturbances() if one[1] == action])


@pytest.mark.slow
def test_ck_a_with_a_thread_that_writes_too(tmp_path: Path) -> None:
    """TensorBoard's; an error of it is told where the run asks it to write everything down."""
    subject = Subject(tmp_path, resumed=True, tensorboard=True)
    chosen = [
        (n, a) for n, a in subject.disturbances() if "tensorboard" in subject.operations[n - 1]
    ]
    check(tmp_path, subject, chosen)


def test_every_kind_of_operation_comes_up(resumed: Subject) -> None:
    """What the layer does not see it cannot disturb: a run does all of these."""
    kinds = {line.split()[0] for line in resumed.operations}
    assert kinds == {"open", "read", "list", "create", "write", "truncate", "fsync", "rename",
                     "mkdir", "unlink", "rmdir"}  # fmt: skip
    saves = [line for line in resumed.operations if ".writing-" in line]
    assert len(saves) >= 3 * 3  # two files and a manifest: each is made, written, flushed


def test_ck_a_everything_is_on_the_disk_before_it_gets_its_name(anew: Subject) -> None:
    """A kill does not show it, since the system keeps what was written: a power failure would.

    Each file of a checkpoint is written and flushed, then their folder; then comes the rename, and
    then the flush of the folder that the name is in; and only then is another one removed.
    """
    told = [(line.split()[0], line.split()[1]) for line in anew.operations]
    checkpoints = str(anew.whole / "run" / "checkpoints")
    named = [
        n for n, (kind, path) in enumerate(told)
        if kind == "rename" and Path(path).parent == Path(checkpoints) and "/update_" in path
    ]  # fmt: skip
    assert len(named) >= 4
    for at in named:
        draft = f"{checkpoints}/.writing-{Path(told[at][1]).name}"
        before = told[:at]
        files = [path for kind, path in before if kind == "create" and path.startswith(f"{draft}/")]
        assert len(files) == 3
        for file in files:
            last_write = max(n for n, one in enumerate(before) if one == ("write", file))
            assert ("fsync", file) in before[last_write:], file
        last = max(n for n, (_, path) in enumerate(before) if path.startswith(f"{draft}/"))
        assert ("fsync", draft) in before[last:]
        after = told[at + 1 :]
        flushed = after.index(("fsync", checkpoints))
        assert not any(".removing-" in path for _, path in after[:flushed])


def test_log_a_the_rows_that_a_checkpoint_counts_on_are_on_the_disk_before_it(
    anew: Subject,
) -> None:
    """Its state holds the length of the file, which a power failure could make shorter."""
    rows = ("fsync", str(anew.whole / "run" / "metrics.jsonl"))
    told = [(line.split()[0], line.split()[1]) for line in anew.operations]
    begun = [n for n, (kind, path) in enumerate(told) if kind == "mkdir" and ".writing-" in path]
    assert len(begun) >= 4
    for before, at in zip([0, *begun], begun, strict=False):
        assert rows in told[before:at]


def test_ck_a_so_is_the_status(anew: Subject) -> None:
    new, final = (str(anew.whole / "run" / n) for n in (".status.json.new", "status.json"))
    own = [line for line in anew.operations if line.split()[1] in (new, final)]
    steps = [line.split()[0] for line in own if not line.startswith(("open", "read"))]
    assert steps == ["create", "write", "fsync", "rename"] * (len(steps) // 4)
    assert len(steps) >= 8
