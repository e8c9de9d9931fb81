"""Sphinx extension: a page for each file of the repository that a page links to."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[3]
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".md": "markdown", ".toml": "toml"}

_log = logging.getLogger(__name__)


def file_of(docname: str, target: str) -> PurePosixPath | None:
    """The file or folder of the repository that ``target`` means on the page ``docname``.

    Returns:
        Its path from the root; None: there is no such file.
    """
    path = (ROOT / docname).parent / target
    path = path.resolve()
    if not path.exists() or ROOT not in path.parents:
        return None
    return PurePosixPath(path.relative_to(ROOT).as_posix())


def resolve(app: Sphinx, doctree: nodes.document) -> None:
    """Point links that lead to no other page at a file's page, or at a folder's README.

    What leads nowhere is left as it is, and Sphinx complains of it.
    """
    env, here = app.env, app.env.docname
    kinds = (addnodes.pending_xref, addnodes.download_reference)
    for node in [n for kind in kinds for n in doctree.findall(kind)]:
        if node.get("reftype") != "myst":
            continue
        target = node["reftarget"].partition("#")[0]
        if node.get("refdomain") == "doc":
            if target in env.found_docs:
                continue
            target = os.path.relpath(f"{target}.md", os.path.dirname(here) or ".")
        path = file_of(here, target) if target else None
        page = _page(env, path) if path is not None else None
        if page is None:
            continue
        if page not in env.found_docs:
            _linked(env).setdefault(here, set()).add(str(path))
        uri = app.builder.get_relative_uri(here, page)
        node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def _page(env: BuildEnvironment, path: PurePosixPath) -> str | None:
    if str(path) == "README.md":
        return "index"
    if (ROOT / path).is_dir():
        readme = f"{path}/README"
        return readme if readme in env.found_docs else None
    return f"source/{path}"


class Pages:
    """What Sphinx asks for once all documents are written: the files' own pages."""

    def __init__(self, app: Sphinx) -> None:
        self._app = app

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        highlighter = self._app.builder.highlighter  # type: ignore[attr-defined]
        for path in sorted(set().union(*_linked(self._app.env).values())):
            language = LANGUAGES.get(Path(path).suffix, "none")
            text = (ROOT / path).read_text()
            body = highlighter.highlight_block(text, language, linenos="inline")
            title = html.escape(path)
            yield (
                f"source/{path}",
                {"title": path, "body": f"<h1><code>{title}</code></h1>{body}"},
                "page.html",
            )


def _linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """The files that each page links to; it is pickled with the rest of what Sphinx knows."""
    if not hasattr(env, "phaseloop_linked"):
        env.phaseloop_linked = {}  # type: ignore[attr-defined]
    return env.phaseloop_linked  # type: ignore[attr-defined, no-any-return]


def _forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _linked(env).pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-read", resolve)
    app.connect("env-purge-doc", _forget)
    app.connect("html-collect-pages", lambda app: Pages(app))
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": False}
