"""What the scripts share and nothing below them needs."""
