"""Find a plan: candidates, predictions, a ranking, and a decision with its reasons."""
