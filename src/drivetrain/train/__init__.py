"""The Trainer: the loop, and everything that prepares, records and restores it."""
