"""Loaders of either kind: of what is indexed, and of what is gone through."""

from __future__ import annotations

from typing import Any

from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.stream import StreamLoader
from phaseloop.engine.data.stream_reader import is_stream

AnyLoader = Loader | StreamLoader


def make_loader(data: Data, **options: Any) -> AnyLoader:
    """The loader for a set of samples, opened; options as :class:`Loader` takes them."""
    return (StreamLoader if is_stream(data.first) else Loader)(data, **options)
