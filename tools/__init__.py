"""Command-line programs."""

if not __name__.startswith("phaseloop."):
    raise ImportError("import phaseloop.tools, not tools")
