"""What ``tools/plot.py`` is made of."""
