"""Plans tried in processes of their own, which cannot hurt the run."""
