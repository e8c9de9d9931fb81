"""Sphinx's settings: how ``make docs`` makes a site of the pages, which stay readable as they are.

The pages are copied to ``build/pages`` first, laid out as in the repository, with the pages that only
the site has (``docs/site``) at the root; so every link between them is right in both places.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "site" / "extensions")]

from phaseloop import __version__  # noqa: E402 the path comes first

project = "phaseloop"
author = "the phaseloop authors"
copyright = author
version = release = __version__
root_doc = "index"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "registered",
    "names",
    "sources",
]
# index.md and code.md show their parts of the README; docs/site stands at the root.
exclude_patterns = ["README.md", "docs/site", "recipes/*/LICENSE*"]
nitpicky = True
default_role = "literal"

# --- the pages ---
myst_heading_anchors = 4
myst_enable_extensions = ["linkify"]
myst_linkify_fuzzy_links = False
# A page of a recipe may begin below the first level; blocks of ours hold output beside commands.
highlight_language = "none"

# --- the reference ---
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# --- how it looks ---
html_theme = "furo"
html_title = f"phaseloop {version}"
html_static_path = [str(HERE / "site" / "_static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}
copybutton_exclude = ".linenos, .gp, .go"
# Output, which a page shows in blocks of text, is not there to be typed.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

# --- make linkcheck ---
linkcheck_timeout = 20
linkcheck_retries = 2
