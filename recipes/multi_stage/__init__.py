"""One run of several parts: importing this package registers the step of those with labels."""

from .step import classify

__all__ = ["classify"]
