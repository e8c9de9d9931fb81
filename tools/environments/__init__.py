"""Environments of their own, for ways to run that need other packages; see make.sh."""
