"""Checkpoints in a place that fsspec reaches, such as a bucket: there is no rename.

The files of a checkpoint come first and its manifest last; a folder without a manifest is no
checkpoint. A removal takes the manifest first. A file ``owner.json`` says which process writes
here: the one that has started last; an earlier one that is still alive is told so at its next save.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from phaseloop.engine.checkpoint.draws import let_draw_apart
from phaseloop.engine.checkpoint.names import MANIFEST, is_name
from phaseloop.engine.checkpoint.silence import end_waiting
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.urls import Url

log = logging.getLogger("phaseloop")

OWNER = "owner.json"


class Remote:
    """A folder of checkpoints that fsspec reaches.

    Retries are those of fsspec and of the package behind it. Methods raise OSError for whatever
    these raise in the end.

    Args:
        folder: its URL; nothing is asked before it is used.
    """

    keeps_what_it_read = True
    """What is verified is kept: fetched again, it might be something else."""

    def __init__(self, folder: Url) -> None:
        self.folder = folder
        self._token = ""

    @functools.cached_property
    def _system(self) -> tuple[Any, str]:
        """The file system, and the folder in its own words: ``bucket/run``, ``/run``."""
        import fsspec

        options = self.folder.options
        try:
            found = fsspec.core.url_to_fs(str(self.folder), **options)
            end_waiting(found[0])
        except Exception as error:
            raise ConfigError(
                "run.storage_options" if options else "run.checkpoints",
                f"{self.folder} cannot be used: {type(error).__name__}: {error}",
            ) from error
        let_draw_apart()
        return found[0], str(found[1]).rstrip("/")

    def exists(self) -> bool:
        """There is something of a run."""
        return any(key != OWNER for key in self._sizes())

    def reach(self) -> None:
        """Find out whether the place can be written, and what is written be removed."""
        probe = f".probe-{uuid.uuid4().hex}"
        self._make()
        self._put(probe, b"")
        with _asking():
            self._fs.rm_file(self._path(probe))

    def take(self, owner: str) -> None:
        """From now on this process writes here, and no earlier one.

        Args:
            owner: this process in words.
        """
        token = uuid.uuid4().hex
        self._make()
        self._put(OWNER, json.dumps({"token": token, "owner": owner}, indent=1).encode())
        self._token = token

    def entries(self) -> list[str]:
        """Names of the folders that hold a manifest."""
        return sorted(_with_manifest(self._sizes()))

    def files(self, name: str) -> list[str]:
        """Names of all that is in a checkpoint.

        Raises:
            FileNotFoundError: it is none.
        """
        found = sorted(self._sizes(name))
        if not found:
            raise FileNotFoundError(f"there is nothing at {self.folder / name}")
        return found

    def begin(self, name: str) -> None:
        """Make room for the files of a new checkpoint."""
        self._check_owner()
        there = self._sizes(name)
        self._check_free(name, there)
        if there:  # of an upload that was cut short
            self._remove_files(name, there)
        self._make(name)

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[IO[bytes]]:
        """A new file of that checkpoint; it is there when the context ends."""
        with _asking():
            opened = self._fs.open(self._path(name, file), "wb")
            try:
                yield opened
                opened.close()  # the last piece is sent here
            except BaseException:
                _discard(opened)
                raise

    def finish(self, name: str, manifest: bytes, sizes: Mapping[str, int]) -> None:
        """Now it is a checkpoint.

        Args:
            manifest: content of its last file.
            sizes: bytes of its other files, which have to be there.
        """
        self._check_owner()  # before all else: who has taken the place has cleaned it
        there = self._sizes(name)
        self._check_free(name, there)
        if there != sizes:
            raise OSError(f"{self.folder / name} holds {there} bytes after {dict(sizes)} were sent")
        try:
            self._put(f"{name}/{MANIFEST}", manifest)
        except BaseException:  # it may have come there all the same
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._path(name, MANIFEST))
            raise

    def abandon(self, name: str) -> None:
        """Leave nothing of a checkpoint that was not finished, as far as that can be done."""
        with contextlib.suppress(OSError, RuntimeError):
            self._check_owner()  # what is there now may be another process's
            there = self._sizes(name)
            if MANIFEST not in there:
                self._remove_files(name, there)

    @contextlib.contextmanager
    def open(self, name: str, file: str) -> Iterator[IO[bytes]]:
        """A file of a checkpoint, to be read."""
        with _asking(), self._fs.open(self._path(name, file), "rb") as opened:
            yield opened

    def move(self, name: str, target: str) -> None:
        """Move everything below ``name``, by copying it where it lies; the old goes last."""
        files = sorted(self._sizes(name), key=lambda file: file.endswith(MANIFEST))
        for file in files:
            parent = "/".join([target, *file.split("/")[:-1]])
            self._make(parent)
            with _asking():
                self._fs.cp_file(self._path(name, file), self._path(target, file))
        self.remove(name)

    def beside(self, target: str) -> bool:
        """Something is in the way of :meth:`move`."""
        return bool(self._sizes(target))

    def aside(self, folder: str) -> list[str]:
        """Names of what lies in a folder below this one."""
        return sorted({key.split("/")[0] for key in self._sizes(folder)})

    def remove(self, name: str) -> None:
        """Remove a checkpoint; cut short, it leaves nothing that passes for one."""
        self._remove_files(name, self._sizes(name))

    def clean(self) -> None:
        """Remove what an interrupted upload or removal left behind: folders without a manifest."""
        there = self._sizes()
        leftovers = {key.split("/")[0] for key in there if "/" in key} - _with_manifest(there)
        for name in sorted(filter(is_name, leftovers)):
            log.info("%s has no %s: removed, it was cut short", self.folder / name, MANIFEST)
            self.remove(name)

    # --- what is asked of the file system ---

    @property
    def _fs(self) -> Any:
        return self._system[0]

    def _path(self, *parts: str) -> str:
        return "/".join([self._system[1], *(part for part in parts if part)])

    def _sizes(self, name: str = "") -> dict[str, int]:
        """Every file below a folder, by its path from there, with its bytes."""
        root = self._path(name)
        with _asking():
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(root, detail=True)
            except FileNotFoundError:
                return {}
        here = {str(path)[len(root) + 1 :]: facts["size"] for path, facts in found.items()}
        return {key: size for key, size in here.items() if key and not key.endswith("/")}

    def _put(self, key: str, content: bytes) -> None:
        with _asking():
            self._fs.pipe_file(self._path(key), content)

    def _make(self, name: str = "") -> None:
        """A folder, where there are such things.

        A path that begins with a bucket's name has none; making one could make the bucket.
        """
        path = self._path(name)
        if path.startswith("/"):
            with _asking():
                self._fs.makedirs(path, exist_ok=True)

    def _remove_files(self, name: str, files: Mapping[str, int]) -> None:
        for file in sorted(files, key=lambda file: file != MANIFEST):
            with _asking(), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name, file))
        if self._system[1].startswith("/"):
            with contextlib.suppress(Exception):  # an empty folder is nothing
                self._fs.rm(self._path(name), recursive=True)

    def _check_free(self, name: str, there: Mapping[str, int]) -> None:
        if MANIFEST in there:
            raise FileExistsError(
                f"it is there already, and nothing was overwritten: another run saves to "
                f"{self.folder}; give each its own run.checkpoints"
            )

    def _check_owner(self) -> None:
        """Raises OSError when another process has started to write here."""
        if not self._token:
            return
        with _asking():
            self._fs.invalidate_cache()
            try:
                found = json.loads(self._fs.cat_file(self._path(OWNER)))
            except (FileNotFoundError, ValueError):
                return
        if found.get("token") != self._token:
            raise OSError(
                f"{found.get('owner')} has started since to save to {self.folder}, and nothing "
                f"was overwritten: end one of the two, or give each its own run.checkpoints"
            )


def _with_manifest(keys: Iterable[str]) -> set[str]:
    """Names of the folders that hold a manifest, of the paths of all files."""
    parts = [key.split("/") for key in keys]
    return {name for name, *rest in parts if rest == [MANIFEST]}


def owner(folder: object) -> str:
    """This process in words, for a run in ``folder``."""
    return f"process {os.getpid()} on {os.uname().nodename}, with the run folder {folder},"


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Errors of the packages behind fsspec, which have classes of their own, as OSError."""
    try:
        yield
    except (OSError, RuntimeError, PhaseloopError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _discard(opened: Any) -> None:
    """Give a file up, so that what there is of it is not sent."""
    with contextlib.suppress(Exception):
        opened.closed = True  # fsspec's own files: closing them would send the rest
    with contextlib.suppress(Exception):
        opened.discard()
