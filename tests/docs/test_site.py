"""The site of the documentation has all that there is; ``make docs`` builds it.

Here only what can be seen without building it, which takes half a minute.
"""

from __future__ import annotations

import re

import phaseloop.hooks
import phaseloop.train_steps
from phaseloop.engine import registry
from phaseloop.engine.config import build  # noqa: F401 registers torch's optimizers and losses
from tests.docs import pages

SITE = pages.ROOT / "docs" / "site"
REFERENCE = {page.stem: page.read_text() for page in (SITE / "reference").glob("*.rst")}


def _entries() -> set[str]:
    """The lines of the tables of contents."""
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (SITE / "index.md").read_text(), re.DOTALL)
    return {line for tree in trees for line in tree.splitlines() if line and line[0] != ":"}


def test_every_page_is_in_a_table_of_contents() -> None:
    wanted = {f"docs/{page.stem}" for page in (pages.ROOT / "docs").glob("*.md")}
    assert wanted | {f"reference/{name}" for name in REFERENCE} <= _entries()


def test_every_public_name_is_in_the_reference_once() -> None:
    lists = re.findall(
        r"\.\. public::\n(?:   :.*\n)?\n((?:   \w+\n)+)", "\n".join(REFERENCE.values())
    )
    named = [name for names in lists for name in names.split()]
    known = [name for name in phaseloop.__all__ if name != "default_hooks"]
    augmentations = {entry.target.__name__ for entry in registry.augmentations}
    transforms = {entry.target.__name__ for entry in registry.batch_transforms}
    assert sorted(named) == sorted(set(known) - augmentations - transforms)
    assert "autofunction:: phaseloop.default_hooks" in REFERENCE["hooks"]


def test_every_kind_of_component_is_in_the_reference() -> None:
    kinds = {name for name, thing in vars(registry).items() if isinstance(thing, registry.Registry)}
    shown = set(re.findall(r"\.\. registered:: (\w+)", "\n".join(REFERENCE.values())))
    ours = {kind for kind in kinds if any(_ships(entry) for entry in getattr(registry, kind))}
    assert shown == ours


def test_every_tool_and_recipe_is_in_the_reference() -> None:
    files = (pages.ROOT / "tools").glob("*.py")
    tools = {file.stem for file in files if "\nUSAGE" in file.read_text()}
    assert set(re.findall(r"\.\. usage:: (\w+)", REFERENCE["tools"])) == tools
    recipes = {page.parent.name for page in (pages.ROOT / "recipes").glob("*/README.md")}
    assert set(re.findall(r"public:: phaseloop\.recipes\.(\w+)", REFERENCE["recipes"])) == recipes


def _ships(entry: registry.Entry) -> bool:
    module = entry.target.__module__
    return module.startswith(("phaseloop.", "torch.")) and "recipes" not in module
