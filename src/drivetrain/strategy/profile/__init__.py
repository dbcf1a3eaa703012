"""What is known about a model and a machine before a plan is tried."""
