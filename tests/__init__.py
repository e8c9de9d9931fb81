"""Tests: they mirror the tree; ``contract/`` holds the behaviours with numbers, by id."""
