"""torch_xla is not there, does not fit, or cannot be loaded: that is said, and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import logging
import os
import sys
from typing import Any

import pytest
import torch

from phaseloop import ConfigError
from phaseloop.engine.backends.xla import package

HOW = ("make env-xla", "phaseloop[xla]")


def version(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Which torch_xla seems to be installed."""

    def answer(name: str) -> str:
        assert name == "torch_xla"
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", answer)
    for setting in package._SETTINGS:  # put back with them
        monkeypatch.setenv(setting, "1")


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        package.load("cpu")
    text = str(caught.value)
    assert text.startswith("backend: ") and all(how in text for how in HOW)
    return text


def test_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, None)
    assert "is not installed" in refusal()


def test_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, "1.13.0")
    text = refusal()
    assert "torch_xla 1.13.0 does not fit" in text and str(torch.__version__) in text


@pytest.mark.parametrize("error", [ImportError("undefined symbol: f"), OSError("no libpython")])
def test_it_cannot_be_loaded(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        logging.getLogger().addHandler(logging.NullHandler())
        raise error

    version(monkeypatch, str(torch.__version__))
    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    handlers = list(logging.getLogger().handlers)
    assert str(error) in refusal()
    assert os.environ["PJRT_DEVICE"] == "TPU"
    assert logging.getLogger().handlers == handlers


def test_what_is_said_elsewhere_meanwhile_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's lines, and what torch_xla itself says to the root logger."""
    root, seen = logging.getLogger(), []

    def loads(name: str) -> Any:
        logging.getLogger("phaseloop").warning("ours")
        logging.getLogger("elsewhere").warning("theirs")
        root.warning("of torch_xla")
        raise ImportError(name)

    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.getMessage()))
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    version(monkeypatch, str(torch.__version__))
    monkeypatch.setattr(importlib, "import_module", loads)
    refusal()
    root.warning("later")
    assert seen == ["ours", "theirs", "later"]


@pytest.mark.parametrize("console", [True, False])
def test_lines_are_said_once_where_it_was_imported_first(
    console: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("phaseloop")
    text = io.StringIO()
    default = logging.StreamHandler(text)
    default.setFormatter(logging.Formatter(logging.BASIC_FORMAT))  # as basicConfig() does
    monkeypatch.setattr(root, "handlers", [default])
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()] if console else [])
    monkeypatch.setitem(sys.modules, "torch_xla", object())
    version(monkeypatch, str(torch.__version__))
    monkeypatch.setattr(importlib, "import_module", lambda name: _fails())
    for _ in range(2):
        refusal()
    ours.warning("ours")
    logging.getLogger("elsewhere").warning("theirs")
    said = ["WARNING:phaseloop:ours"] * (not console) + ["WARNING:elsewhere:theirs"]
    assert text.getvalue().splitlines() == said
    assert len(default.filters) == 1


def _fails() -> Any:
    raise ImportError("undefined symbol: f")


def test_the_device_is_none_of_them() -> None:
    with pytest.raises(ConfigError, match=r"backend\.device: 'cuda' is not auto, cpu, tpu"):
        package.load("cuda")
