"""Tests that need torch_xla, in an environment of its own: ``make test-xla``."""
