"""The Trainer: the loop, and what prepares, records and restores it."""
