"""Sweeps: one experiment with many parameters; samplers propose trials, executors run them, one loop joins them."""
