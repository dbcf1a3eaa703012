"""From what is known to a plan: candidates, predictions, a ranking, and a decision that explains itself."""
