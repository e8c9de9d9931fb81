"""Checkpoints: what is in one, and how it gets to disk whole or not at all."""
