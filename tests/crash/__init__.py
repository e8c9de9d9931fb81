"""Crash: the command line is killed, starved and lied to at random instants, and has to come out
equal to an undisturbed run. ``python -m tests.crash`` runs as many kills as one likes."""
