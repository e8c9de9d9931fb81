"""Recipes: complete examples, written against the public face only, as a user would."""

if not __name__.startswith("phaseloop."):
    raise ImportError("import phaseloop.recipes, not recipes")
