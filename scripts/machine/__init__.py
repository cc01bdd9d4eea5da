"""Checks of a machine for training, and a benchmark of its GPU against the dry run."""
