"""Where checkpoints may lie: a folder of this machine, or a URL that fsspec reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phaseloop.engine.errors import ConfigError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)
_CHAIN = re.compile(r"[A-Za-z0-9+.-]+::")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_HERE = ("file", "local")
_USUAL = ("s3", "gs", "az", "abfs", "sftp", "hdfs", "smb", "memory")

_HARMLESS = frozenset(
    ("account_name", "addressing_style", "anon", "client_kwargs", "config_kwargs",
     "connect_timeout", "default_block_size", "endpoint_url", "host", "location", "max_attempts",
     "max_concurrency", "mode", "port", "profile", "project", "protocol", "read_timeout", "region",
     "region_name", "requester_pays", "retries", "s3", "s3_additional_kwargs", "signature_version",
     "use_ssl", "user", "username", "verify")
)  # fmt: skip
MASK = "***"


class Url:
    """A place that fsspec reaches, such as ``s3://bucket/run``; joined by ``/`` as paths are.

    Args:
        text: the URL.
        options: what the file system of its protocol takes (``run.storage_options``).
    """

    __slots__ = ("_text", "options")

    def __init__(self, text: str, options: Mapping[str, Any] | None = None) -> None:
        self._text = text.rstrip("/") if not text.endswith("://") else text
        self.options = dict(options or {})

    @property
    def protocol(self) -> str:
        """``s3`` of ``s3://bucket/run``."""
        return self._text.split("://", 1)[0]

    @property
    def name(self) -> str:
        """The last part."""
        return self._text.split("://", 1)[1].rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """Everything but the last part; of a bucket, the bucket."""
        head, slash, _ = self._text.rpartition("/")
        return Url(head, self.options) if slash and not head.endswith("/") else self

    def __truediv__(self, part: str) -> Url:
        return Url(f"{self._text}/{part}", self.options)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Url({self._text!r})"  # without the options, which may hold a password

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


Place = Path | Url


def is_url(text: str) -> bool:
    """It is reached through fsspec: a URL of another protocol than ``file``."""
    match = _URL.match(text)
    return match is not None and match[1] not in _HERE


def place(text: str, options: Mapping[str, Any] | None = None) -> Place:
    """The folder or the URL that a text means; ``file:///a/b`` is the folder ``/a/b``."""
    if is_url(text):
        return Url(text, options)
    match = _URL.match(text)
    return Path(text if match is None else match[2])


def same(a: Place, b: Place) -> bool:
    """Both mean one place; links in paths are followed."""
    if isinstance(a, Path) and isinstance(b, Path):
        return a.resolve() == b.resolve()
    return a == b


def check_url(text: str, key: str) -> None:
    """Raises ConfigError for a URL that cannot be used, whatever it holds.

    A path is right but where it begins as a URL does, such as ``file:/a``.
    Nothing is asked over a network.
    """
    match = _URL.match(text)
    if _CHAIN.match(text):
        raise ConfigError(key, f"{text!r} chains protocols; give one, such as s3://bucket/run")
    if match is None:
        check_no_scheme(text, key)
        return
    protocol, rest = match[1], match[2]
    if protocol in _HERE:
        if not rest.startswith("/"):
            raise ConfigError(key, f"{text!r} has no absolute path: file:///home/me/run")
        return
    if not rest.strip("/"):
        raise ConfigError(key, f"{text!r} names no folder, such as {protocol}://bucket/run")
    if ":" in rest.split("/")[0].rpartition("@")[0]:
        raise ConfigError(
            key,
            f"a {protocol}:// URL with a password in it would be logged: give the password by "
            f"run.storage_options, or by the environment",
        )
    _check_protocol(protocol, key)


def check_no_scheme(text: str, key: str) -> None:
    """Raises ConfigError for a path that begins as a URL does: it would be a strange folder."""
    if _URL.match(text):
        raise ConfigError(key, f"{text!r} is a URL: give the path of a folder instead")
    if match := _SCHEME.match(text):
        raise ConfigError(
            key,
            f"{text!r} is neither a URL ({match[0]}//...) nor clearly a folder; one of such a name "
            f"is given as ./{text}",
        )


def _check_protocol(protocol: str, key: str) -> None:
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(
            key, f"{protocol}:// is no protocol that fsspec knows; usual ones: {', '.join(_USUAL)}"
        ) from None
    except ImportError as error:
        raise ConfigError(
            key, f"{protocol}:// needs a package that is not installed: {error}"
        ) from None


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options that may be written down: what is not known to be harmless is ``***``."""
    return {key: _shown(str(key), value) for key, value in options.items()}


def _shown(key: str, value: Any) -> Any:
    if key not in _HARMLESS:
        return MASK
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, str) and "@" in value:  # http://user:password@host
        return MASK
    return value


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`without_secrets`, but for what is not known any more."""
    return {
        key: known_options(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if value != MASK
    }
