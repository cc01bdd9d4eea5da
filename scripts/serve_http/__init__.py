"""Beside scripts/serve.py: its keys (config.py) and its page (page.html)."""
