"""Tests of the pages in docs/ and of README.md."""
