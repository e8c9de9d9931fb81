"""make data: what is fetched is compared, kept once, linked; and why not, where it cannot be."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rigs import process

FILES = {"a": b"first", "b": b"second"}
PACKAGE, PLACE = "dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"
OTHER, ELSEWHERE = "sword-text-kjv", "usr/share/sword/modules/texts/ztext/engKJV2006eb"

# Stand-ins: a "package" is a folder of its name, and to unpack it is to copy that folder.
APT = """\
#!/bin/sh
for word; do package=$word; done
echo "$package" >>"$TEST_ROOT/fetched"
[ -e "$TEST_ROOT/packages/$package" ] || exit 100
echo >"${package}_1_all.deb"
"""
DPKG = """\
#!/bin/sh
package=${2##*/}
cp -r "$TEST_ROOT/packages/${package%_1_all.deb}/." "$3"
"""
NEEDED = ("bash", "cat", "chmod", "cp", "dirname", "flock", "gunzip", "gzip", "id", "ln", "mkdir",
          "mktemp", "mv", "rm", "sh", "sha256sum")  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """A checkout with nothing but what `make data` is made of, and the packages for it."""
    (tmp_path / "tools").mkdir()
    shutil.copy(process.ROOT / "tools/data.sh", tmp_path / "tools")
    for recipe, names in (("fashion_mnist", "ab"), ("char_lm", "b")):
        folder = tmp_path / "recipes" / recipe
        folder.mkdir(parents=True)
        sums = [f"{hashlib.sha256(FILES[name]).hexdigest()}  {name}\n" for name in names]
        (folder / "files.sha256").write_text("".join(sums))
    package, other = tmp_path / "packages" / PACKAGE / PLACE, tmp_path / "packages" / OTHER
    package.mkdir(parents=True)
    (package / "a.gz").write_bytes(gzip.compress(FILES["a"]))  # the one packed, the other not
    (package / "b").write_bytes(FILES["b"])
    (other / ELSEWHERE).mkdir(parents=True)
    (other / ELSEWHERE / "b").write_bytes(FILES["b"])
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in NEEDED:
        (programs / name).symlink_to(shutil.which(name))
    for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return tmp_path


def fetch(root: Path, cache: str | None = None) -> subprocess.CompletedProcess[str]:
    given = {
        "PHASELOOP_CACHE": cache or str(root / "cache"),
        "PATH": str(root / "bin"),
        "TEST_ROOT": str(root),
    }
    return subprocess.run(
        [root / "tools/data.sh"],
        env={**os.environ, **given},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def fetched(root: Path) -> list[str]:
    """The packages that were asked for, in their order."""
    log = root / "fetched"
    return log.read_text().splitlines() if log.exists() else []


def assert_whole(root: Path) -> None:
    for name, content in FILES.items():
        assert (root / "data/fashion-mnist" / name).read_bytes() == content
    assert (root / "data/kjv/b").read_bytes() == FILES["b"]
    # Two folders and the lock: nothing is left of the way there.
    assert in_cache(root) == {"fashion-mnist", "kjv", ".lock"}


def in_cache(root: Path) -> set[str]:
    return {path.name for path in (root / "cache/data").iterdir()}


def test_it_is_fetched_once_and_again_where_it_is_damaged(root):
    for _ in range(2):
        ended = fetch(root)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == "ready: data/fashion-mnist\nready: data/kjv\n"
        assert_whole(root)
    assert fetched(root) == [PACKAGE, OTHER]
    (root / "cache/data/fashion-mnist/b").write_bytes(b"secont")
    assert fetch(root).returncode == 0
    assert_whole(root)
    assert fetched(root) == [PACKAGE, OTHER, PACKAGE]


@pytest.mark.parametrize("name", ["fashion-mnist", "kjv"])
@pytest.mark.parametrize("link", [False, True])
def test_what_the_user_has_put_there_stays(root, name, link):
    place = root / "own" if link else root / "data" / name
    place.mkdir(parents=True)
    (place / "mine").write_text("")
    (root / "data").mkdir(exist_ok=True)
    if link:
        (root / "data" / name).symlink_to(place)
    ended = fetch(root)
    assert ended.returncode == 0
    assert os.listdir(root / "data" / name) == ["mine"]
    assert f"data/{name} is not from here, and stays" in ended.stdout
    assert f"ready: data/{name}\n" not in ended.stdout


def test_a_link_that_leads_nowhere_is_made_anew(root):
    (root / "data").mkdir()
    (root / "data/kjv").symlink_to(root / "gone")
    assert fetch(root).returncode == 0
    assert_whole(root)


def test_a_cache_by_a_relative_path_is_linked_too(root):
    assert fetch(root, cache="./cache").returncode == 0
    assert_whole(root)


def test_another_content_is_refused_and_not_kept(root):
    (root / "packages" / PACKAGE / PLACE / "b").write_bytes(b"secont")
    ended = fetch(root)
    assert ended.returncode == 1
    assert f"{PACKAGE} holds is not what" in ended.stderr
    assert "fashion-mnist" not in in_cache(root)
    assert not (root / "data/fashion-mnist").exists()


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_where_one_fails_the_other_is_fetched(root, damage):
    if damage == "gone":
        shutil.rmtree(root / "packages" / PACKAGE)
    else:  # a file that the list names is not in the package
        (root / "packages" / PACKAGE / PLACE / "b").unlink()
    ended = fetch(root)
    assert ended.returncode == 1
    assert ended.stdout == "ready: data/kjv\n"
    assert in_cache(root) == {"kjv", ".lock"}


def test_where_the_last_fails_it_is_a_failure_too(root):
    shutil.rmtree(root / "packages" / OTHER)
    ended = fetch(root)
    assert ended.returncode == 1
    assert ended.stdout == "ready: data/fashion-mnist\n"
    assert "apt-get update" in ended.stderr


def test_programs_that_are_missing_are_named_at_once(root):
    for name in ("apt-get", "dpkg-deb", "flock", "sha256sum"):
        (root / "bin" / name).unlink()
    ended = fetch(root)
    assert ended.returncode == 1
    assert "this machine does not have: apt-get dpkg-deb flock sha256sum. " in ended.stderr
    assert PACKAGE in ended.stderr and OTHER in ended.stderr
    assert not fetched(root) and not (root / "cache").exists()
