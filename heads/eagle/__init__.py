"""EAGLE-1 and EAGLE-3: one small layer run autoregressively on the target's features."""
