"""Training of draft heads: entry points, the one loop, data, state on disk."""
