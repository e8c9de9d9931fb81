"""The package torch_xla: imported when the backend is made, and prepared before that."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phaseloop.engine import replica
from phaseloop.engine.errors import ConfigError

log = logging.getLogger("phaseloop")

DEVICES = {"auto": None, "cpu": "CPU", "tpu": "TPU"}
"""Values of ``backend.device``, each with what the package calls it."""

_DEVICE = "PJRT_DEVICE"

_SETTINGS = {
    # Else a rate of exactly 0 or 1 is a constant of the compiled graph: one more to compile.
    "XLA_NO_SPECIAL_SCALARS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""What the package reads when it is loaded; what the environment says already is left so."""

_HOW = (
    "It has to be torch_xla 2.9 beside torch 2.9: `make env-xla` builds an environment of its own "
    "with both, and in one of yours it is the extra: pip install 'phaseloop[xla]'"
)


def load(device: str = "auto") -> Any:
    """The module ``torch_xla``; no device is touched.

    Args:
        device: ``auto`` (what ``PJRT_DEVICE`` says, or a TPU, or else the CPU), ``cpu`` or
            ``tpu``.

    Raises:
        ConfigError: there is no such package, or it does not work with this torch; another device
            is in use in this process, or none has that name.
    """
    if device not in DEVICES:
        raise ConfigError("backend.device", f"{device!r} is not {', '.join(DEVICES)}")
    _check_versions()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    wanted, given = DEVICES[device], os.environ.get(_DEVICE)
    if wanted is not None:
        os.environ[_DEVICE] = wanted
    try:
        with replica.one_at_a_time, _in_silence():
            package = importlib.import_module("torch_xla")
            runtime = importlib.import_module("torch_xla.runtime")
            importlib.import_module("torch_xla.core.xla_model")
    except (ImportError, OSError) as error:
        _put_back(given)
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError("backend", f"torch_xla cannot be imported ({said}). {_HOW}") from error
    _check_device(package, wanted, given)
    if device == "auto" and given is None:
        log.info("backend.device=auto: XLA runs on the %s", runtime.device_type())
    return package


def _check_versions() -> None:
    """Torch says nothing where they do not fit: the package's metadata do not name it."""
    try:
        found = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "backend", f"xla needs the package torch_xla, which is not installed. {_HOW}"
        ) from None
    if found.split(".")[:2] != str(torch.__version__).split(".")[:2]:
        raise ConfigError(
            "backend",
            f"torch_xla {found} does not fit torch {torch.__version__}, which is here. {_HOW}",
        )


def _check_device(package: Any, wanted: str | None, given: str | None) -> None:
    """The first device that a process uses is the only one that it can use."""
    if wanted in (None, given) or not package._XLAC._xla_runtime_is_initialized():
        return
    _put_back(given)
    raise ConfigError(
        "backend.device",
        f"XLA runs on {given} in this process already, and cannot change to {wanted}",
    )


def _put_back(device: str | None) -> None:
    if device is None:
        os.environ.pop(_DEVICE, None)
    else:
        os.environ[_DEVICE] = device


@contextmanager
def _in_silence() -> Iterator[None]:
    """The package gives the root logger a handler, and tells it what we say in our own words."""
    root = logging.getLogger()
    if "torch_xla" in sys.modules:
        _let_ours_be_said_once(root)
        yield
        return
    handlers = list(root.handlers)
    root.addFilter(_no_warning)  # of what is said to this very logger, which nobody here does
    try:
        yield
    finally:
        root.removeFilter(_no_warning)
        root.handlers[:] = handlers


def _no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def _let_ours_be_said_once(root: logging.Logger) -> None:
    """It was imported before, and what it has given the root logger prints our lines again."""
    for handler in root.handlers:
        formatter = handler.formatter
        by_default = (
            type(handler) is logging.StreamHandler
            and formatter is not None
            and formatter._fmt == logging.BASIC_FORMAT
        )
        if by_default and _not_on_console not in handler.filters:
            handler.addFilter(_not_on_console)


def _not_on_console(record: logging.LogRecord) -> bool:
    """Nobody of ours prints it."""
    return record.name != log.name or not log.handlers
