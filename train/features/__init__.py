"""The target's features stored once, read in place of its forward pass."""
