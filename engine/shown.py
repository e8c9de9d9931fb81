"""Shown: pictures, histograms and texts that a step or a hook gives, for hooks to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phaseloop.engine import histograms, images
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.histograms import Histogram
from phaseloop.engine.shards import is_shard

if TYPE_CHECKING:
    from phaseloop.engine.backends.base import Backend

IMAGE, HISTOGRAM, TEXT = "image", "histogram", "text"


class Shown:
    """What is to be seen beside the numbers, on its way to those who write it.

    What belongs to a window waits until it is closed: a checkpoint is never made before, so
    nothing can be written and then be made again. What belongs to no window is given on at once.

    Attributes:
        sinks: by kind, who writes it, called with the name, the thing and the update. A picture is
            uint8 [H, W, C], a histogram a :class:`Histogram`, both on the host. Of a kind that
            nobody writes nothing is kept.
        waiting: what the window at hand has, by kind and name.
    """

    def __init__(self) -> None:
        self.sinks: dict[str, list[Callable[[str, Any, int], None]]] = {
            IMAGE: [], HISTOGRAM: [], TEXT: [],
        }  # fmt: skip
        self.waiting: dict[tuple[str, str], Any] = {}

    def add_image(self, name: str, image: Tensor, lazy: bool = False) -> None:
        """Keep a copy, as uint8 on the image's device; a second one of a name takes its place.

        Args:
            name, image: see :meth:`Task.record_image`.
            lazy: the device is: then all processes keep it, or their programs would not be one.

        Raises:
            ConfigError: no name of files, or no picture.
        """
        images.check(name, image)
        if self.sinks[IMAGE] or lazy:
            self.waiting[IMAGE, name] = images.as_bytes(image.detach())

    def add_histogram(self, name: str, tensor: Tensor, lazy: bool = False) -> None:
        """Count the values as they are now; see :meth:`Task.record_histogram`.

        Raises:
            ConfigError: no name, or not a tensor of real numbers.
        """
        _check_name("record_histogram", name)
        histograms.check(name, tensor)
        # Of a sharded tensor each process has a part.
        if self.sinks[HISTOGRAM] or lazy or is_shard(tensor):
            found = histograms.histogram_of(tensor)
            if found is not None:
                self.waiting[HISTOGRAM, name] = found

    def add_text(self, name: str, text: str) -> None:
        """Keep a text; see :meth:`Task.record_text`.

        Raises:
            ConfigError: no name, or no text.
        """
        _check_name("record_text", name)
        if not isinstance(text, str):
            raise ConfigError(f"record_text({name!r})", f"{type(text).__name__} is no text")
        if self.sinks[TEXT]:
            self.waiting[TEXT, name] = text

    def give(self, update: int, backend: Backend) -> None:
        """To all sinks. Here the host waits for the device."""
        if backend.lazy:  # copying is no part of the step's program
            backend.mark_step()
        waiting, self.waiting = self.waiting, {}
        came = iter(backend.to_host([t for thing in waiting.values() for t in _tensors(thing)]))
        for (kind, name), thing in waiting.items():
            if kind == IMAGE:
                thing = next(came).permute(1, 2, 0).contiguous()
            elif kind == HISTOGRAM:
                thing = Histogram(next(came), next(came))
                if not thing.facts[2]:  # there was no finite value
                    continue
            for sink in self.sinks[kind]:
                sink(name, thing, update)

    def drop(self) -> None:
        """The window has come to nothing, or is made again."""
        self.waiting = {}


def _tensors(thing: Any) -> list[Tensor]:
    if isinstance(thing, Histogram):
        return [thing.facts, thing.counts]
    return [thing] if isinstance(thing, Tensor) else []


def _check_name(method: str, name: str) -> None:
    if not isinstance(name, str) or not name.strip("/ "):
        raise ConfigError(f"{method}({name!r})", "give it a name")
