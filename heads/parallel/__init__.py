"""Heads that guess all levels from one feature of the target: Medusa, Hydra heads."""
