"""The documentation is true: what it shows is run, its tables are the code's, its links lead on."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

import phaseloop.hooks
import phaseloop.train_steps
from phaseloop.engine import registry
from phaseloop.engine.checkpoint.compare import FREE_HOOKS, MAY_CHANGE
from phaseloop.engine.config import (
    build,  # noqa: F401 registers torch's optimizers and losses
    schema,
)
from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.schema import Schema, TestSet, TrainSet
from phaseloop.engine.events import EVENTS, Hook, Order
from phaseloop.engine.trainer import Trainer
from tests.docs import pages

README = pages.ROOT / "README.md"
PAGES = [README, *sorted((pages.ROOT / "docs").glob("*.md"))]
DOCS = pages.ROOT / "docs"

RECIPES = sorted((pages.ROOT / "recipes").rglob("README.md"))


def _id(page: Path) -> str:
    return page.stem if page in PAGES else f"recipes-{page.parent.name}"


each_page = pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=_id)


# What their examples need is in environments of their own: tests/horovod, tests/xla play them; and
# test_errors.py plays the page of mistakes, one by one.
_ELSEWHERE = {"horovod", "xla", "errors"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in _ELSEWHERE], ids=lambda page: page.stem
)
def test_every_block_does_what_the_page_says(page: Path, tmp_path: Path) -> None:
    pages.Player(page, tmp_path, started_anew=page.stem == "start").play()


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(path), f"{page.name}: {target}"


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)
    code = "\n".join(block.text for block in pages.blocks(page))
    named = re.findall(r"`make ([a-z-]+)", pages.prose(page))
    for target in [*named, *re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)]:
        assert target in targets


def test_every_page_is_linked_from_the_readme() -> None:
    for page in DOCS.glob("*.md"):
        assert f"](docs/{page.name})" in README.read_text()


# --- pages of recipes: what they show is trained in full, so it is not played here ---


@pytest.mark.parametrize("page", RECIPES, ids=_id)
def test_the_commands_of_a_recipe_are_configurations_that_there_are(page: Path) -> None:
    said = [block for block in pages.blocks(page) if block.language in ("bash", "sh")]
    for command in (line for block in said for line, _ in pages.commands(block.text)):
        words = shlex.split(command, comments=True)
        if words[:2] == ["python", "tools/run.py"]:
            schema.check(compose(words[2:]).config)
        elif words[:2] == ["python", "tools/seeds.py"]:
            schema.check(compose([w for w in words[2:] if not w.startswith("seeds=")]).config)
        elif words[0] == "python":
            assert (pages.ROOT / words[1]).exists() or words[1] == "-m", command


# --- loop.md ---

LOOP = DOCS / "loop.md"


def test_the_whole_loop_is_shown() -> None:
    assert textwrap.dedent(inspect.getsource(Trainer._walk)) in LOOP.read_text()


def test_the_table_of_events_names_all_in_order() -> None:
    assert [row[0] for row in pages.table(LOOP, "event")] == list(EVENTS)


def test_the_table_of_hook_order() -> None:
    wanted = [
        [
            entry.name,
            str(entry.target.order),
            "yes" if entry.declared["default"] else "no",
            "yes" if entry.target.only_watches else "no",
            ", ".join(_listens_to(entry.target)),
        ]
        for entry in registry.hooks
        if entry.target.__module__.startswith(f"{phaseloop.hooks.__name__}.")
    ]
    shown = pages.table(LOOP, "hook")
    assert sorted(shown) == sorted(wanted)
    orders = [int(row[1]) for row in shown]
    assert orders == sorted(orders)


def test_the_table_of_order_values() -> None:
    values = {name: value for name, value in vars(Order).items() if name.isupper()}
    wanted = [[f"Order.{name}", str(value)] for name, value in values.items()]
    assert [row[:2] for row in pages.table(LOOP, "name")] == wanted


def _listens_to(hook: type[Hook]) -> list[str]:
    return [event for event in EVENTS if getattr(hook, event) is not getattr(Hook, event)]


# --- configuration.md ---

CONFIGURATION = DOCS / "configuration.md"


def test_the_table_of_root_keys() -> None:
    assert [row[0] for row in pages.table(CONFIGURATION, "key")] == [f.name for f in fields(Schema)]


def test_the_table_of_groups() -> None:
    files: dict[str, list[str]] = {}
    for file in (pages.ROOT / "configs").glob("*/*.yaml"):
        files.setdefault(file.parent.name, []).append(file.stem)
    wanted = {group: ", ".join(sorted(names)) for group, names in files.items()}
    assert dict(pages.table(CONFIGURATION, "group")) == wanted


def test_the_table_of_registered_names() -> None:
    kinds = {
        "train_step": registry.train_steps,
        "hooks": registry.hooks,
        "criterion": registry.criteria,
        "meters": registry.meters,
        "sampler": registry.samplers,
        "batch_transform": registry.batch_transforms,
        "augment": registry.augmentations,
        "optimizer": registry.optimizers,
        "schedule": registry.schedules,
        "backend": registry.backends,
    }
    wanted = {kind: ", ".join(sorted(_ours(names))) for kind, names in kinds.items()}
    assert dict(pages.table(CONFIGURATION, "for")) == wanted


def test_the_list_of_what_may_change() -> None:
    listed = [row[0] for row in pages.table(CONFIGURATION, "may change")]
    known = {f.name for f in fields(Schema)}
    coming = {k for k in MAY_CHANGE if k.split(".")[0] not in known}  # no such keys yet
    free = {f"hooks.{name}" for name in FREE_HOOKS}
    assert sorted(", ".join(listed).split(", ")) == sorted(({*MAY_CHANGE} - coming) | free)


# --- data.md ---


def test_the_table_of_keys_of_a_set() -> None:
    of_test = {f.name for f in fields(TestSet)}
    rows = pages.table(DOCS / "data.md", "option")
    assert [row[0] for row in rows] == [f.name for f in fields(TrainSet)]
    assert {row[0] for row in rows if row[2] == "yes"} == of_test
    defaults = {f.name: f.default for f in fields(TrainSet) if f.default is not MISSING}
    for name, shown, *_ in rows:
        if shown:
            assert yaml.safe_load(shown) == defaults[name], name


def _ours(names: registry.Registry) -> list[str]:
    """Without what other tests of this session have registered, and recipes in them."""
    return [
        entry.name
        for entry in names
        if entry.target.__module__.split(".")[0] in ("phaseloop", "torch")
        and not entry.target.__module__.startswith("phaseloop.recipes.")
    ]


def _anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", pages.prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


# --- the tests' own tools can fail ---


def test_output_is_compared_line_by_line_and_in_order() -> None:
    lines = ["saved a", "loss 0.25", "done"]
    assert pages.first_missing(["saved a", "loss ...", "done"], lines) is None
    assert pages.first_missing(["done", "saved a"], lines) == "saved a"
    assert pages.first_missing(["loss"], lines) == "loss"


def test_an_excerpt_is_whole_lines_of_the_source() -> None:
    source = "class A:\n    def f(self):\n        return 1\n"
    assert pages.is_excerpt("def f(self):\n    return 1\n", source)
    assert not pages.is_excerpt("def f(self):\n    return 2\n", source)


def test_commands_know_their_exit_codes() -> None:
    text = "# a remark\necho a \\\n  b\nfalse   # exit code 1\n"
    assert list(pages.commands(text)) == [("echo a    b", 0), ("false", 1)]
