"""Places of checkpoints: what is a URL, what of it is refused, and what is never written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.settings import Run
from phaseloop.engine.urls import (
    MASK,
    Url,
    is_url,
    known_options,
    place,
    same,
    without_secrets,
)


def test_a_url_is_joined_as_a_path_is() -> None:
    url = place("s3://bucket/runs/a/")
    assert isinstance(url, Url) and str(url) == "s3://bucket/runs/a"
    assert (url / "x").name == "x" and (url / "x").parent == url
    assert url.parent.parent == Url("s3://bucket") == Url("s3://bucket").parent
    assert url.protocol == "s3" and len({url, place("s3://bucket/runs/a")}) == 1
    assert url != Path("s3://bucket/runs/a")


def test_what_is_a_folder(tmp_path: Path) -> None:
    assert place("file:///a/b") == place("local:///a/b") == place("/a/b") == Path("/a/b")
    assert place("a/b") == Path("a/b") and not is_url("file:///a") and not is_url("auto")
    (tmp_path / "link").symlink_to(tmp_path)
    assert same(tmp_path / "link", tmp_path) and not same(tmp_path, Url("memory://a"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dir": "s3://b/run"}, r"run\.dir: .*this machine; give the URL as run\.checkpoints"),
        ({"dir": "file:///a"}, r"run\.dir: 'file:///a' is a URL: give the path"),
        ({"dir": "file:/a"}, r"run\.dir: 'file:/a' is neither a URL .file://...."),
        ({"checkpoints": "file:/a"}, r"run\.checkpoints: .*given as \./file:/a"),
        ({"checkpoints": "s3:bucket/a"}, r"run\.checkpoints: .*s3://"),
        ({"resume": "file:/a"}, r"run\.resume: .*neither"),
        ({"checkpoints": ""}, r"run\.checkpoints: give a folder"),
        ({"checkpoints": "gs://b/run"}, r"run\.checkpoints: gs:// needs a package.*gcsfs"),
        ({"checkpoints": "nope://b/run"}, r"run\.checkpoints: nope:// is no protocol.*s3"),
        ({"checkpoints": "s3://"}, r"run\.checkpoints: 's3://' names no folder"),
        ({"checkpoints": "file://a/b"}, r"run\.checkpoints: .*no absolute path"),
        ({"checkpoints": "simplecache::s3://b/a"}, r"run\.checkpoints: .*chains protocols"),
        ({"checkpoints": "ftp://me:secret@host/a"}, r"run\.checkpoints: .*password.*options"),
        ({"resume": "gs://b/run"}, r"run\.resume: gs:// needs a package"),
        ({"storage_options": {"anon": True}}, r"run\.storage_options: are for a URL"),
        ({"checkpoints": "/a", "storage_options": {"anon": True}}, r"run\.storage_options"),
    ],
)
def test_what_cannot_be_used_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        Run(**settings).check()
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoints": "memory://a", "storage_options": {"anon": True}},
        {"checkpoints": "s3://bucket/a"},
        {"checkpoints": "file:///a"},
        {"checkpoints": "a b/c"},
        {"checkpoints": "./file:/a", "dir": "./a:b"},
        {"checkpoints": "/a/s3:b", "dir": "runs/12:30"},
        {"resume": "s3://bucket/a/update_000000001-1", "storage_options": {"anon": True}},
    ],
)
def test_what_can_be_used(settings: dict[str, Any]) -> None:
    Run(**settings).check()


def test_secrets_are_not_written_down() -> None:
    options = {
        "key": "AK", "secret": "S", "token": "T", "password": 123, "anon": False,
        "endpoint_url": "http://here:9000",
        "client_kwargs": {"region_name": "eu-west-1", "aws_secret_access_key": "X"},
        "config_kwargs": {"retries": {"max_attempts": 3}},
        "unknown": "who knows",
    }  # fmt: skip
    shown = without_secrets(options)
    assert shown == {
        "key": MASK, "secret": MASK, "token": MASK, "password": MASK, "anon": False,
        "endpoint_url": "http://here:9000",
        "client_kwargs": {"region_name": "eu-west-1", "aws_secret_access_key": MASK},
        "config_kwargs": {"retries": {"max_attempts": 3}},
        "unknown": MASK,
    }  # fmt: skip
    assert without_secrets({"endpoint_url": "http://me:pw@here"}) == {"endpoint_url": MASK}
    assert known_options(shown) == {
        "anon": False,
        "endpoint_url": "http://here:9000",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"retries": {"max_attempts": 3}},
    }
    assert "S" not in repr(Url("s3://b/a", options)).replace("s3", "")
