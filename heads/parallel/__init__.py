"""Heads that guess all levels from one feature of the target: Medusa, Medusa-2, Hydra heads."""
