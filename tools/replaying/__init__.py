"""Replaying an update of a past run: what `tools/replay.py` is made of."""
