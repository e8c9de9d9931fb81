"""Tests of the engine's parts, each on its own."""
