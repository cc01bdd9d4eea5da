"""Training texts: rows of chats, their tokens on disk, batches that depend on (seed, step)
alone.
"""
