"""Entry points that are run by name: python scripts/NAME.py KEY=VALUE."""
