"""Heads on the target's last feature that guess one token each: Medusa, all side by side,
and Hydra heads, each after the tokens before its own."""
