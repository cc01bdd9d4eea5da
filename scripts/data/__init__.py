"""Training data written by the target itself, here or by a server."""
