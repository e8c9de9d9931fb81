"""Sphinx extension: names in docstrings and signatures, which are those of where a thing is defined.

The reference has each public thing once, as ``phaseloop.NAME``. A name of a private module leads
there; one of another package, or of a part of ours that the reference leaves out, is shown without a
link. One that exists nowhere stays a fault.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import typing
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import phaseloop


def answer(app: Sphinx, env: BuildEnvironment, node: Any, inner: Any) -> nodes.Element | None:
    """Sphinx's question for a name of Python that the reference does not have as it is written."""
    if node.get("refdomain") != "py":
        return None
    target: str = node["reftarget"]
    found = _find(target, node.get("py:module"), node.get("py:class"))
    if found is None:
        return None
    domain = env.get_domain("py")
    for name in _public_names(found, target):
        if name in domain.objects:  # type: ignore[attr-defined]
            entry = domain.objects[name]  # type: ignore[attr-defined]
            uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
            return nodes.reference("", "", inner, internal=True, refuri=f"{uri}#{entry.node_id}")
    return inner


def _public_names(found: Any, target: str) -> list[str]:
    last = target.rsplit(".", 2)
    names = [f"phaseloop.{last[-1]}", f"phaseloop.{'.'.join(last[-2:])}"]
    qualified = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    return [*names, qualified] if _is_ours(found, target) else []


def _is_ours(found: Any, target: str) -> bool:
    module = str(getattr(found, "__module__", "") or "")
    return module.startswith("phaseloop") or target.startswith("phaseloop")


def _find(target: str, module: str | None, owner: str | None) -> Any:
    """The thing called ``target`` in a docstring of ``owner`` of ``module``; None: nothing is."""
    scopes = [phaseloop, builtins, typing]
    modules = [sys.modules.get(module)] if module else []
    if module and owner and module in sys.modules:
        thing = _attribute(sys.modules[module], owner)
        modules.append(sys.modules.get(str(getattr(thing, "__module__", ""))))
        scopes.insert(0, thing)
    for scope in [*filter(None, modules), *filter(None, scopes)]:
        if (found := _attribute(scope, target)) is not None:
            return found
    return _imported(target) or _anywhere(target)


def _anywhere(name: str) -> Any:
    """In a signature Sphinx does not say of which module it is."""
    ours = [m for n, m in sorted(sys.modules.items()) if n.startswith("phaseloop.")]
    return next(filter(None, (_attribute(module, name) for module in ours)), None)


def _attribute(scope: Any, path: str) -> Any:
    for part in path.split("."):
        scope = getattr(scope, part, None)
    return scope


def _imported(target: str) -> Any:
    """Of the longest part of the path that is a module."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        rest = ".".join(parts[length:])
        return _attribute(module, rest) if rest else module
    return None


_kept: dict[str, list[str]] = {}


def _keep(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon, which takes what stands before a colon in it for an attribute's type."""
    if what in ("attribute", "data", "property"):
        _kept[name] = list(lines)


def _put_back(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """After napoleon: what an attribute says is a sentence."""
    lines[:] = _kept.pop(name, lines)


def _readable(app: Any, what: str, name: str, thing: Any, opts: Any, sig: Any, result: Any) -> Any:
    """A dataclass's ``<factory>`` is no Python, and Sphinx would split the signature at commas."""
    return (sig.replace("<factory>", "..."), result) if sig else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("missing-reference", answer)
    app.connect("autodoc-process-signature", _readable)
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _put_back, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
