"""Experiments: describe a run and start it."""
