"""Rigs: tiny trainings whose outcome can be worked out by hand, and probes to look inside."""
