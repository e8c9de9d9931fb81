"""The command line: ``python tools/run.py config=NAME key=value ...`` trains an experiment.

Exit codes: 0 done; 1 an error; 2 a wrong configuration, found before any data is read, or a folder
in which another process trains; 129 SIGHUP, 130 Ctrl-C and 143 SIGTERM, with the state saved.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phaseloop.engine import outcomes, replica
from phaseloop.engine.config import compose as composing
from phaseloop.engine.config import places, processes
from phaseloop.engine.config import schema as schemas
from phaseloop.engine.errors import CheckpointError, ConfigError, DataError, InUseError
from phaseloop.engine.remarks import remarks
from phaseloop.tools import launching, one_process, submitting

DONE, ERROR, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130
SIGNALLED = 128
"""A signal's number is added to it."""

_HYDRA_FLAGS = ("-m", "--multirun", "-sc", "--shell-completion", "-c", "--cfg", "-i", "--info",
                "--hydra-help")  # fmt: skip

_SWEEP = "sweep"

TIMED_FOLDER = (
    "warning: run.dir has the time in it, so the same command will not find this run again and "
    "run.resume=auto cannot continue it; use a fixed folder"
)

USAGE = """\
usage: phaseloop config=NAME [key=value ...]

  config=NAME                     the experiment; there are: {experiments}
  optimizer.lr=0.1                change any key
  optimizer=sgd                   choose a file of a group: {groups}
  hooks.early_stop.patience=3     switch on a hook, or change one; hooks.NAME=null switches it off
  run.dir=DIR  run.resume=never   another folder; anew, with the old run put aside
  plan=true                       print what would run, and exit
  only=test weights=best          test a run's weights (best, newest, or a checkpoint's folder)
  --multirun key=1,2,3            one run for each value, each in a folder of its own
  backend=ddp backend.processes=4 four processes on this machine
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    words = words_given(arguments, _usage)
    if any(word.split("=")[0] in _HYDRA_FLAGS for word in words):
        _hand_to_hydra(words)
    else:
        sys.exit(run(words))


def words_given(arguments: Sequence[str] | None, usage: Callable[[], str]) -> list[str]:
    """The words of a command line; without any, or asked for help, the program says its usage.

    User modules are looked for in the current folder too, last, so that they shadow nothing.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.path.append(os.getcwd())
    if not words or {"-h", "--help"} & set(words):
        print(usage())
        sys.exit(DONE if words else WRONG_CONFIG)
    return words


def _usage() -> str:
    return USAGE.format(
        experiments=", ".join(composing.experiments()),
        groups=", ".join(g for g in composing.groups() if g != "config"),
    )


def run(overrides: Sequence[str], job_folder: str = "") -> int:
    """Train, test or plan as the overrides say; the exit code.

    Args:
        overrides: ``key=value`` words.
        job_folder: of a multirun: the name of this job's folder below the run's.
    """
    return exit_code(lambda: _run(overrides, job_folder))


def _run(overrides: Sequence[str], job_folder: str) -> int:
    with replica.one_at_a_time:  # Hydra is there once for a process
        composed = composing.compose(overrides)
    schema = schemas.check(composed.config)
    told = os.environ.get("RANK", "0") != "0" or launching.FOLDER in os.environ
    # The same command finds the same folder.
    if composed.timed_folder and schema.run.resume == "auto" and not told:
        print(TIMED_FOLDER, file=sys.stderr)
    schema.run.dir = str(Path(schema.run.dir or Path("runs") / composed.name) / job_folder)
    if schema.run.checkpoints is not None and job_folder:
        schema.run.checkpoints = f"{schema.run.checkpoints.rstrip('/')}/{job_folder}"
    job = places.job(schema.launch)
    if job is not None and not schema.plan and submitting.SUBMITTED not in os.environ:
        one_process.check_launcher("submitting a job", "launch")
        return submitting.submit(overrides, job_folder, schema, job)
    # What follows imports torch: only once the keys are right.
    started = None if schema.plan else processes.wanted(schema.backend)
    if started is not None:
        return launching.start(overrides, job_folder, schema, started)
    schema.run.dir = os.environ.get(launching.FOLDER) or schema.run.dir
    if schema.run.resume == "never" and launching.started_again(Path(schema.run.dir)):
        schema.run.resume = "auto"
    from phaseloop.tools import jobs

    return jobs.run(schema)


def exit_code(job: Callable[[], int]) -> int:
    """What ``job`` returns; where it raises, the code of that kind of error, which is said."""
    try:
        return job()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:  # of a step, a hook or a dataset: the run is not over
        outcomes.say(error, ERROR, traceback.format_exc().rstrip())
        return ERROR
    except Exception as error:
        code = WRONG_CONFIG if isinstance(error, ConfigError | InUseError) else ERROR
        outcomes.say(error, code, _in_words(error))
        return code


def _in_words(error: Exception) -> str:
    """What is printed of an error."""
    if isinstance(error, ConfigError):
        return f"wrong configuration: {error}"
    # Said in a sentence; a traceback only where an error of a program is behind it. Of a disk
    # or a network it is in log.txt: it shows nothing but the packages that reach them.
    cause = error.__cause__
    of_disk = isinstance(error, CheckpointError) and isinstance(cause, OSError)
    in_a_sentence = isinstance(error, DataError | CheckpointError) and (cause is None or of_disk)
    if in_a_sentence or isinstance(error, InUseError):
        return f"{type(error).__name__}: {error}"
    return traceback.format_exc().rstrip() + remarks(error)


def _hand_to_hydra(words: list[str]) -> None:
    """Several runs, shell completion, and Hydra's own information."""
    here = Path.cwd() / "configs"
    search = [f"hydra.searchpath=[file://{here}]"] if here.is_dir() else []
    flags = [word for word in words if word.startswith("-")]
    rest = composing.normalize([w for w in words if not w.startswith("-")], composing.groups())
    if not {"-m", "--multirun"} & set(flags):
        _start_hydra(composing.MAIN, [*flags, *rest, *search], lambda jobs_words: DONE)
        return
    try:
        composing.check_experiment(rest)
    except ConfigError as error:
        print(f"wrong configuration: {error}", file=sys.stderr)
        sys.exit(WRONG_CONFIG)
    # Hydra could not put together what we can, such as a list of stages in place of one; so it
    # gets the words under other names, and splits them into jobs.
    keys: dict[str, str] = {}
    sent: list[str] = []
    for word in rest:
        key, sign, value = word.partition("=")
        if key.lstrip("+").startswith("hydra"):
            sent.append(word)
        elif sign and not word.startswith("~"):
            sent.append(f"++word{len(keys)}={value}")
            keys[f"word{len(keys)}"] = key
    deleted = [word for word in rest if word.startswith("~")]

    def job(words: list[str]) -> int:
        pairs = [word.lstrip("+").split("=", 1) for word in words]
        own = [f"{keys[name]}={value}" for name, value in pairs if name in keys]
        named = [word for word in [*own, *deleted] if not word.startswith("config=")]
        name = ",".join(word.lstrip("+").replace("/", "_") for word in named)
        return run([*own, *deleted], name)

    _start_hydra(_SWEEP, [*flags, *sent, *search], job)


def _start_hydra(config: str, words: list[str], job: Callable[[list[str]], int]) -> None:
    """Let Hydra read ``words``, and call ``job`` with those of each job that it makes of them."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    sys.argv = [sys.argv[0], *words, "hydra/job_logging=none", "hydra/hydra_logging=none"]

    @hydra.main(config_path=str(composing.PACKAGE_CONFIGS), config_name=config, version_base="1.3")
    def each(_: Any) -> None:
        words = list(HydraConfig.get().overrides.task)
        GlobalHydra.instance().clear()  # there can be one at a time, and run() needs its own
        code = job(words)
        if code != DONE:
            sys.exit(code)

    each()


if __name__ == "__main__":
    main()
