"""Run one update of a past run again: ``python tools/replay.py RUN update=N``.

It begins at the newest checkpoint before the update, comes to it exactly as the run did, and runs
it twice: once as it is, for its time, and once with every operation, module and gradient watched.
Where a loss, gradient or weight is not finite it says which operation of which module was the
first, and which samples are behind it. The run's folder is only read.

Exit codes: 0 replayed, whatever was found; 1 an error; 2 wrong arguments.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phaseloop.engine.errors import ConfigError
from phaseloop.tools import one_process
from phaseloop.tools.replaying.report import report
from phaseloop.tools.run import DONE, exit_code, words_given

if TYPE_CHECKING:
    from phaseloop.engine.checkpoint.store import Saved
    from phaseloop.engine.config.schema import Schema
    from phaseloop.engine.events import Hook
    from phaseloop.engine.task import Task
    from phaseloop.tools.replaying.found import Replay
    from phaseloop.tools.replaying.run import Make

__all__ = ["replay", "report"]

log = logging.getLogger("phaseloop")

USAGE = """\
usage: python tools/replay.py RUN [update=N] [until=M] [key=value ...]

  RUN                the run's folder, such as runs/digits; it is only read
  update=N           which update; default: the one that the run's failure names, or else the one
                     after the newest checkpoint
  until=M            updates N to M, a line for each; the first that is not finite is looked at
  roll_backs=K       as it was when it had rolled back K times; default: as it was in the end
  json=true          print JSON
  to=FILE            write JSON to a file too
  data.train.workers=0   change a key that makes no other training of it
"""

_OWN = re.compile(r"^\+{0,2}(update|until|roll_backs|json|to)=(.*)$", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(run(words_given(arguments, lambda: USAGE)))


def run(words: Sequence[str]) -> int:
    """The replay that the words describe; the exit code."""
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    own = {match[1]: match[2] for word in words if (match := _OWN.match(word))}
    rest = [word for word in words if not _OWN.match(word)]
    # A run of several has the words that it was started with as its name.
    folders = [word for word in rest if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1 or folders[0].startswith("-"):
        given = ", ".join(map(repr, folders)) or "none"
        raise ConfigError("run", f"give the folder of one run, such as runs/digits; got {given}")
    as_json = {"true": True, "false": False}.get(own.get("json", "false").lower())
    if as_json is None:
        raise ConfigError("json", f"{own['json']!r} is not true or false")
    to = Path(own["to"]) if own.get("to") else None
    if to is not None and not to.parent.is_dir():
        raise ConfigError("to", f"there is no folder {to.parent}")
    overrides = [word for word in rest if word not in folders]
    one_process.check_launcher("a replay")
    found = replay(folders[0], _number(own, "update"), until=_number(own, "until"),
                   roll_backs=_number(own, "roll_backs", 0), overrides=overrides)  # fmt: skip
    text = json.dumps(found.plain(), indent=1)
    if to is not None:
        to.write_text(text + "\n")
    print(text if as_json else report(found))
    return DONE


def _number(own: Mapping[str, str], key: str, least: int = 1) -> int | None:
    if key not in own:
        return None
    if not re.fullmatch(r"\d+", own[key]) or int(own[key]) < least:
        raise ConfigError(key, f"{own[key]!r} is not a number: {least}, {least + 1}, ...")
    return int(own[key])


def replay(
    folder: str | Path,
    update: int | None = None,
    *,
    until: int | None = None,
    roll_backs: int | None = None,
    overrides: Sequence[str] = (),
    make: Make | None = None,
) -> Replay:
    """Run an update of a past run again.

    Args:
        folder: the run's; nothing in it is changed.
        update: which; None: the one that the run's failure names, or else the one after the newest
            checkpoint.
        until: replay every update up to this one, each for a line; looked at is the first of them
            that is not finite.
        roll_backs: of a run that has rolled back since the checkpoint: as it was when it had done
            so this often; None: as it was in the end.
        overrides: ``key=value``, as on the command line.
        make: for a run that was made in Python: gives its task and its hooks, anew at each call.

    Raises:
        ConfigError: there is no such run or update, or an option makes another training of it.
        CheckpointError: nothing is left to begin with.
        PhaseloopError: an update before it cannot be run again.
    """
    import phaseloop.hooks
    import phaseloop.train_steps  # noqa: F401 registers the steps
    from phaseloop.tools.replaying import find as finding
    from phaseloop.tools.replaying.found import Replay

    run_folder = finding.run_folder(str(folder))
    number = finding.default_update(run_folder) if update is None else update
    if number < 1:
        raise ConfigError("update", f"{number} is less than 1")
    if until is not None and until < number:
        raise ConfigError("until", f"{until} is before update {number}")
    resume, told = "auto", "the task given"
    if make is None:
        config, told = finding.configuration(run_folder, number)
        schema = finding.checked(config, finding.with_overrides(config, overrides))
        resume, make = schema.run.resume, _maker(schema)
    elif overrides:
        raise ConfigError("overrides", "the task was made in Python: change it there")
    start = finding.find_start(run_folder, number, resume)
    found = Replay(
        folder=str(folder),
        update=number,
        start="" if start.saved is None else str(start.saved.path),
        passed_over=start.passed_over,
        configuration=told,
    )
    with _Quiet():
        return _replay(found, make, run_folder.path, start.saved, until, roll_backs)


def _maker(schema: Schema) -> Make:
    from phaseloop.engine.config.build import build

    def make() -> tuple[Task, Mapping[str, Hook]]:
        built = build(schema)
        return built.task, built.hooks

    return make


def _replay(
    found: Replay,
    make: Make,
    folder: Path,
    start: Saved | None,
    until: int | None,
    roll_backs: int | None,
) -> Replay:
    from phaseloop.tools.replaying import follow as following
    from phaseloop.tools.replaying import look as looking
    from phaseloop.tools.replaying import run as running

    number = found.update
    with running.scratch() as scratch:
        follower = following.Follower(number, until or number, folder, scratch, roll_backs)
        found.error = running.follow(make, start, follower)
        found.logged, found.differs = follower.logged, follower.differs
        found.rolled_back = follower.rolled_back
        if until is not None:
            found.lines = follower.lines
            bad = next((line.update for line in follower.lines if not line.finite), None)
            if found.error and bad is None:
                bad = follower.reached + 1
            if bad is None or bad != number:
                if bad is None:
                    return found
                found.update = bad
                lines = found.lines
                found = _replay(found, make, folder, start, None, roll_backs)
                found.lines = lines
                return found
        looker = looking.Looker(number, follower.orders)
        begin = follower.snapshot or start
        error = running.follow(looking.uncompiled(make), begin, looker)
        found.error = found.error or error
    found.seconds, found.cold = follower.seconds, follower.cold
    if follower.bits and looker.bits:
        found.same_when_watched = follower.bits == looker.bits
    looker.tell(found)
    if found.fault is not None and follower.bad is not None and follower.bad < number:
        found.fault.earlier = follower.bad
    return found


class _Quiet(logging.StreamHandler[TextIO]):
    """Warnings of the replayed run go to stderr, once each, and nothing else that it says."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self._said and not getattr(record, "only_file", False)
        self._said.add(text)
        return new

    def __enter__(self) -> None:
        log.addHandler(self)

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)


if __name__ == "__main__":
    main()
