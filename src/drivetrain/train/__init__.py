"""The Trainer: the loop and what stands around it."""
