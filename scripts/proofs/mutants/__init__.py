"""Mutants: one seeded bug after the other, and which proof notices it."""
