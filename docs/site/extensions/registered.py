"""Sphinx extension: directives that list what the code has, so that no list has to be kept.

``public::`` shows things of the public face, or of a package, with all their public members;
``registered:: KIND`` shows each registered component of ours of that kind, under the name that a
configuration uses; ``usage:: TOOL`` what a tool of ``tools/`` says of itself.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import phaseloop.hooks
import phaseloop.train_steps
from phaseloop.engine import registry
from phaseloop.engine.config import build  # noqa: F401 registers torch's optimizers and losses


class Public(SphinxDirective):
    """Things of ``phaseloop`` by their names; or all that the package in the argument offers."""

    optional_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0] if self.arguments else "phaseloop")
        names = " ".join(self.content).split() or package.__all__
        lines: list[str] = []
        for name in names:
            thing = getattr(package, name)
            if callable(thing):
                kind = "autoclass" if inspect.isclass(thing) else "autofunction"
                # Of a bound method autodoc would take away one more argument.
                shown = str(inspect.signature(thing)) if inspect.ismethod(thing) else ""
                lines += [f".. {kind}:: {package.__name__}.{name}{shown}"]
                lines += ["   :members:", ""] if kind == "autoclass" else [""]
        return self.parse_text_to_nodes(StringList(lines, "public"))


class Registered(SphinxDirective):
    """The components of one kind: a section each for ours, a line for those of torch."""

    required_arguments = 1
    option_spec: ClassVar[Any] = {"recipes": lambda value: True}

    def run(self) -> list[nodes.Node]:
        entries = sorted(getattr(registry, self.arguments[0]), key=lambda entry: entry.name)
        inside = "recipes" in self.options
        ours = [e for e in entries if ("recipes" in e.target.__module__) == inside]
        lines: list[str] = []
        borrowed = [e for e in ours if not e.target.__module__.startswith("phaseloop.")]
        for entry in ours:
            if entry not in borrowed:
                lines += _section(entry)
        if borrowed:
            names = ", ".join(f"``{e.name}``: ``{_full_name(e.target)}``" for e in borrowed)
            lines += ["", f"Those of torch, with torch's options: {names}.", ""]
        return self.parse_text_to_nodes(
            StringList(lines, "registered"), allow_section_headings=True
        )


class Usage(SphinxDirective):
    """What ``python tools/NAME.py --help`` prints, and the tool's own first words."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(f"phaseloop.tools.{self.arguments[0]}")
        usage = getattr(module, "_usage", lambda: module.USAGE)()
        doc = inspect.getdoc(module) or ""
        lines = [*doc.splitlines(), "", ".. code-block:: text", ""]
        lines += [f"   {line}" for line in usage.splitlines()]
        return self.parse_text_to_nodes(StringList(lines, "usage"))


def _section(entry: registry.Entry) -> list[str]:
    target = entry.target
    kind = "autoclass" if inspect.isclass(target) else "autofunction"
    title = f"``{entry.name}``"
    lines = ["", title, "-" * len(title), "", f".. {kind}:: {_full_name(target)}"]
    if target.__module__.startswith("phaseloop.engine.") and hasattr(phaseloop, target.__name__):
        lines.append("   :no-index:")  # the reference of the public face has it
    return [*lines, ""]


def _full_name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("public", Public)
    app.add_directive("registered", Registered)
    app.add_directive("usage", Usage)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
